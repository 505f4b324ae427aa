"""Runs a module and answers calls of what it defines, from tests in another sandbox (`checker.py`).

So no expected value and no test is in a process with the module, and its results reach the tests as plain data.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from itertools import islice

from async_rl.parts.sandbox.inside.confinement import confine, receive, send
from async_rl.parts.sandbox.inside.plain_data import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

MAX_ITEMS = 1_000_000
"""Of an iterator, which may be endless."""


def main(connection: int, request: dict[str, Any]) -> None:
    """Answers each call, and an empty message with the names that the module defines."""
    confine(request)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.set_int_max_str_digits(0)
    module = sys.modules["solution"] = type(sys)("solution")
    exec(compile(request["source"], "solution.py", "exec"), vars(module))
    objects: list[Any] = []
    while True:
        try:
            asked = receive(connection)
        except EOFError:
            os._exit(0)
        answer = _answer(asked, vars(module), objects) if asked else json.dumps(list(vars(module)))
        send(connection, answer.encode())


def _answer(asked: bytes, names: Mapping[str, Any], objects: list[Any]) -> str:
    """`["value", what was returned, the arguments that were changed]` or `["raised", name of the exception, text]`."""

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        do, target, args, kwargs = loads(asked, objects.__getitem__)
        found = names[target] if isinstance(target, str) else objects[target]
        before = [_state(arg) for arg in args]
        value = _do(do, found, args, kwargs)
        changed = [arg if _state(arg) != old else None for arg, old in zip(args, before, strict=True)]
        return dumps(["value", value, changed], keep)
    except BaseException as error:
        known = next(kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
        return dumps(["raised", known, str(error)[:1000]], keep)


def _do(do: str, found: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if do == "call":
        return found(*args, **kwargs)
    if do == "get":
        return getattr(found, *args)
    if do == "item":
        return found[args[0]]
    if do == "len":
        return len(found)
    return list(islice(found, MAX_ITEMS))


def _state(arg: Any) -> str | None:
    """Of an argument that a function may change in place, as tests of sorting in place expect."""
    return repr(arg) if type(arg) in (list, dict, set) else None
