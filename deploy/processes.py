"""The processes of a local deployment: started, watched and ended, each through its keeper (`deploy.keeper`)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import IO

from rich.console import Console
from rich.markup import escape

from async_rl.errors import AsyncRLError, ProcessFailed
from deploy.plan import Process

GRACE_S = 10.0
POLL_S = 0.2
NUM_LOG_LINES = 20
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic.*$", re.MULTILINE)


class Stopped(BaseException):
    """The deployer itself was told to stop; not an `Exception`, so that nothing on the way takes it for a fault."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Running:
    """A started process, held through its keeper; `log_start` is where its output begins in the log file."""

    def __init__(self, process: Process, keeper: subprocess.Popen[bytes], log_start: int) -> None:
        self.process = process
        self._keeper = keeper
        self._log_start = log_start

    def exit_code(self) -> int | None:
        """None while it runs; 128 + N where signal N ended it."""
        return self._keeper.poll()

    def request_end(self) -> None:
        """Asks the keeper to end the process; returns at once."""
        assert self._keeper.stdin is not None, "the keeper is started with a pipe"
        self._keeper.stdin.close()

    def wait_end(self) -> None:
        """Waits until the process and all its descendants are gone, at most a little longer than the grace time."""
        try:
            self._keeper.wait(GRACE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def failure(self) -> ProcessFailed:
        """What to raise when it ended and should not have: its name, how it ended, and its last log lines."""
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
    """The processes of a run as a context: leaving it ends them all, the trainer before the instances it talks to."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end_all([running for running in self._running if running.process.role != "instance"])
        _end_all([running for running in self._running if running.process.role == "instance"])

    def start(self, process: Process) -> Running:
        process.log_file.parent.mkdir(parents=True, exist_ok=True)
        with process.log_file.open("ab") as log:
            log_start = log.tell()
            running = Running(process, _start_keeper(process, log), log_start)
        self._running.append(running)
        return running

    def run(self, process: Process, while_running: Callable[[], None]) -> None:
        """Runs a process to its end, calling `while_running` every `POLL_S` and once after.

        Raises:
            ProcessFailed: it ended with another code than 0.
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
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _raise_stopped)


def explain_end(end: Stopped | AsyncRLError, console: Console) -> int:
    """Says why a program that starts processes ended early; what it exits with."""
    if isinstance(end, Stopped):
        console.print(f"{end}; all its processes have ended")
        return end.exit_code
    console.print(f"[bold red]{type(end).__name__}[/]: {escape(str(end))}", highlight=False, soft_wrap=True)
    return 1


def _raise_stopped(signum: int, _frame: FrameType | None) -> None:
    raise Stopped(signum)


def _start_keeper(process: Process, log: IO[bytes]) -> subprocess.Popen[bytes]:
    cores = ",".join(str(core) for core in process.cores)
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.keeper", "--cores", cores, "--grace-s", str(GRACE_S), "--", *process.argv],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **process.env},
        # Out of the terminal's foreground group: Ctrl-C reaches the deployer alone, which then ends all in order.
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
    """The log up to torchrun's one line on the failed worker; its own traceback would hide the worker's."""
    report = TORCHRUN_REPORT.search(log)
    return log[: report.end()] if report else log
