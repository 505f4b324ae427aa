"""The processes of a local deployment: started, watched and ended, each through its own `process_guard.py`."""

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from rich.console import Console
from rich.markup import escape

from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from async_rl.programs.command_line import USAGE_ERROR
from async_rl.programs.failure_report import VARIABLE, read_failure
from deploy.local.plan import Process

POLL_S = 0.2
NUM_LOG_LINES = 20
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic.*$", re.MULTILINE)


class Stopped(BaseException):
    """The deployer received a signal to stop; not an `Exception`, so that no handler mistakes it for a fault."""

    def __init__(self, signum: int, *, is_first: bool = True) -> None:
        """`is_first`: a further signal interrupts the wait for the processes, which their guards then end."""
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
        self.is_first = is_first


class Running:
    """A started process, controlled through its guard.

    `log_start` is the offset of its output in the log file, `report` the file for its named error.
    """

    def __init__(self, process: Process, guard: subprocess.Popen[bytes], log_start: int, report: Path) -> None:
        self.process = process
        self._guard = guard
        self._log_start = log_start
        self._report = report

    def exit_code(self) -> int | None:
        """None while it runs; 128 + N if signal N ended it."""
        return self._guard.poll()

    def request_end(self) -> None:
        """Requests the guard to end the process; returns at once."""
        assert self._guard.stdin is not None, "the guard is started with a pipe"
        self._guard.stdin.close()

    def wait_end(self) -> None:
        """Waits until the process and all its descendants have ended, at most a little longer than the grace time."""
        try:
            self._guard.wait(self.process.grace_s + 5.0)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def failure(self) -> ProcessFailed:
        """The error to raise if it ended unexpectedly.

        Its own named error, with the path of its log; else how it ended, and its last log lines.
        """
        if reported := read_failure(self._report):
            return ProcessFailed(
                f"{reported.message}\n(from {self.process.name}; its log is {self.process.log_file})", reported.kind
            )
        lines = "\n".join(f"    {line}" for line in self.last_lines())
        return ProcessFailed(
            f"{self.process.name} {_how_it_ended(self.exit_code())}; the end of {self.process.log_file}:\n{lines}"
        )

    def last_lines(self) -> list[str]:
        with self.process.log_file.open("rb") as file:
            file.seek(self._log_start)
            text = file.read().decode(errors="replace")
        return _without_torchrun_report(text).rstrip().splitlines()[-NUM_LOG_LINES:]


class Deployment:
    """The processes of a run as a context: leaving it ends them all, the trainer before the instances."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._reports = tempfile.TemporaryDirectory(prefix="async-rl-reports-")

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end_all([running for running in self._running if running.process.role != "instance"])
        _end_all([running for running in self._running if running.process.role == "instance"])
        self._reports.cleanup()

    def start(self, process: Process) -> Running:
        with _open_log(process.log_file) as log:
            log_start = log.tell()
            report = Path(self._reports.name) / process.name
            running = Running(process, _start_guard(process, log, report), log_start, report)
        self._running.append(running)
        return running

    def run(self, process: Process, while_running: Callable[[], None]) -> None:
        """Runs a process until it exits, calling `while_running` every `POLL_S` and once after.

        Raises:
            ProcessFailed: it exited with a code other than 0.
        """
        running = self.start(process)
        while running.exit_code() is None:
            while_running()
            time.sleep(POLL_S)
        while_running()
        if running.exit_code() != 0:
            raise running.failure()


def stop_on_signals() -> None:
    """Ctrl-C, SIGTERM and a closed terminal raise `Stopped` in the main thread: contexts then end their processes."""
    counter = itertools.count()

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum, is_first=next(counter) == 0)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)


def explain_end(end: Stopped | AsyncRLError) -> int:
    """Prints on standard error why a program that starts processes ended early; returns its exit code."""
    console = Console(stderr=True)
    if isinstance(end, Stopped):
        left = (
            "all its processes have ended"
            if end.is_first
            else "its processes save what they can, and end by themselves"
        )
        console.print(f"{end}; {left}")
        return end.exit_code
    cause = end.cause if isinstance(end, ProcessFailed) else None
    kind = cause or type(end).__name__
    console.print(f"[bold red]{escape(kind)}[/]: {escape(str(end))}", highlight=False, soft_wrap=True)
    return USAGE_ERROR if kind == ConfigError.__name__ else 1


def _open_log(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        raise ConfigError(
            f"the log {str(path)!r} cannot be written: {error.strerror}; correct that, or name another directory as "
            "run.dir"
        ) from error


def _start_guard(process: Process, log: IO[bytes], report: Path) -> subprocess.Popen[bytes]:
    cores = ",".join(str(core) for core in process.cores)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "deploy.local.process_guard",
            "--cores",
            cores,
            "--grace-s",
            str(process.grace_s),
            "--",
            *process.argv,
        ],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **process.env, VARIABLE: str(report)},
        # Outside the terminal's foreground group: only the deployer receives Ctrl-C, and then ends all processes in
        # order.
        start_new_session=True,
    )


def _end_all(running: Iterable[Running]) -> None:
    for each in running:
        each.request_end()
    for each in running:
        each.wait_end()


def _how_it_ended(code: int | None) -> str:
    assert code is not None, "asked how a running process ended"
    number = code - 128 if code > 128 else -code
    if number in set(signal.Signals):
        return f"was ended by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {code}"


def _without_torchrun_report(log: str) -> str:
    """The log up to torchrun's line about the failed worker; torchrun's own traceback would hide the worker's."""
    report = TORCHRUN_REPORT.search(log)
    return log[: report.end()] if report else log
