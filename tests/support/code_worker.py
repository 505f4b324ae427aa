"""A worker whose calls are code: `python -m tests.support.code_worker KIND MARK`, where `KIND` is one of `KINDS`.

Code that runs at once may await; the tasks that it starts end with its call.
"""

import ast
import asyncio
import os
from typing import Any

from async_rl.shared.programs.user_file import traceback_of_user
from async_rl.shared.workers.child import Channel, Served, serve

KINDS = ("in turn", "at once")
HEAD = "import asyncio, ctypes, os, re, signal, subprocess, sys, threading, time\nleft = []\n"
NAMES: dict[str, Any] = {}


def in_turn(code: str, channel: Channel) -> Any:
    names = {**NAMES, "channel": channel, "result": "fine"}
    exec(compile(code, "the_code.py", "exec"), names)
    return names["result"]


async def at_once(code: str, channel: Channel) -> Any:
    names = {**NAMES, "channel": channel, "result": "fine"}
    running = eval(compile(code, "the_code.py", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if asyncio.iscoroutine(running):
        await running
    return names["result"]


def load(kind: str) -> Served:
    """What runs the code; of any other kind, what the code that it is fails with."""
    exec(HEAD, NAMES)
    if kind not in KINDS:
        exec(kind, NAMES)
    is_async = kind == "at once"
    function = at_once if is_async else in_turn
    return Served(function, is_async, lambda error: [traceback_of_user(error)], os.getpid(), ends_tasks=True)


if __name__ == "__main__":
    serve(load)
