"""Scripted inference instances in processes of their own, and an event loop to speak to them."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pools import Pools

from async_rl.event_loop import EventLoopThread

HERE = Path(__file__).parent

# torch's store looks up its peers' names; a name server that drops a question shall not cost 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class ScriptedInstance:
    """A running instance: `url`, and what a test may do to it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        self.url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"

    def rescript(self, **script: Any) -> None:
        self._ask("/script", json.dumps(script).encode())

    def seen(self) -> dict[str, Any]:
        return self._ask("/seen")

    def sums(self) -> list[float]:
        return self._ask("/sums")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.url + path, data=body, timeout=10) as answer:
            return json.loads(answer.read())


@contextmanager
def running(*scripts: dict[str, Any], program: str) -> Iterator[list[ScriptedInstance]]:
    """One process per script, started together."""
    with ExitStack() as stack:
        processes = []
        for script in scripts:
            command = [sys.executable, str(HERE / program), json.dumps(script)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield [ScriptedInstance(process) for process in processes]


@pytest.fixture
def instances() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """`instances({"version": "v1"}, {"die_at": 2})` starts one scripted instance for each script."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="scripted_instance.py"))


@pytest.fixture
def pools_with(loop: EventLoopThread) -> Iterator[Callable[..., Pools]]:
    """`pools_with(timeout_s=1.0)` makes pools with these settings, see there."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Pools:
            pools = Pools(loop, **settings)
            stack.callback(pools.close)
            return pools

        yield make


@pytest.fixture
def start_receivers_once() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """As `instances`, for instances that take weights."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="receiving_instance.py"))


@pytest.fixture(scope="module")
def start_receivers() -> Iterator[Callable[..., list[ScriptedInstance]]]:
    """As `start_receivers_once`, for instances that all tests of a module share: each imports torch."""
    with ExitStack() as stack:
        yield lambda *scripts: stack.enter_context(running(*scripts, program="receiving_instance.py"))


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread()
    yield loop
    loop.close()
