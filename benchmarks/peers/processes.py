"""A program with all its processes, none of which is left when the benchmark ends, however it ends."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

NUM_LAST_CHARACTERS = 3000


class Mark(NamedTuple):
    """Processor seconds of all processes of a side so far, and the clock."""

    cpu_s: float
    wall_s: float


class Side:
    """A running program; its output is in files, which stay as long as their directory."""

    def __init__(self, guard: "subprocess.Popen[bytes]", directory: Path) -> None:
        self._guard = guard
        self._directory = directory

    def runs(self) -> bool:
        return self._guard.poll() is None

    def mark(self) -> Mark:
        root = psutil.Process(self._guard.pid)
        spent = 0.0
        for process in (root, *root.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            # Those that have ended are among the children of those that wait for them.
            spent += times.user + times.system + times.children_user + times.children_system
        return Mark(spent, time.monotonic())

    def require_success(self, limit_s: float) -> None:
        """Waits for the end.

        Raises:
            RuntimeError: it failed, or goes on.
        """
        try:
            code = self._guard.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"did not end within {limit_s:g} s") from None
        if code:
            raise self.failure(f"ended with {code}")

    def failure(self, what: str) -> RuntimeError:
        command = self._guard.args
        last = ((self._directory / "stderr.txt").read_text() + self.output())[-NUM_LAST_CHARACTERS:]
        return RuntimeError(f"{command!r} {what}:\n{last}")

    def output(self) -> str:
        return (self._directory / "stdout.txt").read_text()


@contextmanager
def guarded(command: Sequence[str], directory: Path) -> Iterator[Side]:
    """Runs a program through `async_rl.shared.programs.process_guard`; ends what is left of it at exit."""
    argv = [sys.executable, "-m", "async_rl.shared.programs.process_guard", "--", *command]
    with (directory / "stdout.txt").open("wb") as stdout, (directory / "stderr.txt").open("wb") as stderr:
        guard = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
    try:
        yield Side(guard, directory)
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()
