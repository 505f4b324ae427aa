"""Scripted instances as running processes, see `scripted_instance.py` and `receiving_instance.py`."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class ScriptedInstance:
    """A running instance: `url`, and the operations of a test on it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        self.url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"

    def rescript(self, **script: Any) -> None:
        self._ask("/script", json.dumps(script).encode())

    def seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = self._ask("/seen")
        return seen

    def sums(self) -> list[float]:
        sums: list[float] = self._ask("/sums")
        return sums

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        with urllib.request.urlopen(self.url + path, data=body, timeout=60) as answer:
            return json.loads(answer.read())


@contextmanager
def running(*scripts: dict[str, Any], program: str) -> Iterator[list[ScriptedInstance]]:
    """One process per script, started together."""
    with ExitStack() as stack:
        processes = []
        for script in scripts:
            command = [sys.executable, "-m", f"tests.support.{program}", json.dumps(script)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield [ScriptedInstance(process) for process in processes]
