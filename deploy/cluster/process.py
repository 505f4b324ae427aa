"""One process of a run on this host: started, watched and ended through its own `process_guard.py`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from async_rl.errors import ConfigError, ProcessFailed
from async_rl.shared.programs.failure_report import VARIABLE, read_failure
from async_rl.shared.programs.process_guard import KILL

GRACE_S = 10.0
"""For a process that has nothing to save before it ends."""

STOPPED_MARGIN_S = 30.0
"""Beyond `trainer.lost_after_s`: the other ranks, where there are some, notice a stopped one first."""

NUM_LOG_LINES = 20
TORCHRUN_REPORT = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start: `env` is added to the launcher's own, `cores` are the CPU cores it is pinned to.

    `devices` lists the devices that `env` makes visible, for display. After SIGTERM, it is killed when `grace_s` has
    passed. One that a signal has stopped for `stopped_after_s` is killed.
    """

    name: str
    role: Literal["instance", "trainer", "program"]
    argv: tuple[str, ...]
    log_file: Path
    cores: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    grace_s: float = GRACE_S
    stopped_after_s: float | None = None


class Running:
    """A started process, controlled through its guard.

    `log_start` is the offset of its output in the log file, `report` the file for its named error.
    """

    def __init__(self, process: Process, guard: subprocess.Popen[bytes], log_start: int, report: Path) -> None:
        self.process = process
        self._guard = guard
        self._log_start = log_start
        self._report = report

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._guard.pid

    def exit_code(self) -> int | None:
        """None while it runs; 128 + N if signal N ended it."""
        return self._guard.poll()

    def request_end(self) -> None:
        """Requests the guard to end the process; returns at once."""
        assert self._guard.stdin is not None, "the guard is started with a pipe"
        self._guard.stdin.close()

    def kill(self) -> None:
        """Requests the guard to kill the process, without time to end by itself; returns at once."""
        assert self._guard.stdin is not None, "the guard is started with a pipe"
        # A guard that has just ended reads nothing any more.
        with suppress(BrokenPipeError):
            self._guard.stdin.write(KILL)
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
        try:
            with self.process.log_file.open("rb") as file:
                file.seek(self._log_start)
                text = file.read().decode(errors="replace")
        except OSError as error:
            # Such as one whose directory was removed meanwhile.
            return [f"(the log cannot be read: {error.strerror})"]
        return _without_torchrun_report(text).rstrip().splitlines()[-NUM_LOG_LINES:]


def stopped_after_s(lost_after_s: float) -> float:
    """How long a process of a run may be stopped by a signal before it is killed; of `trainer.lost_after_s`."""
    return lost_after_s + STOPPED_MARGIN_S


def log_path(run_dir: Path, name: str) -> Path:
    """The log file of a process of a run."""
    return run_dir / "logs" / f"{name}.log"


def torchrun_dir(run_dir: Path) -> Path:
    """Where torchrun makes a folder for each of its starts, for its ranks' errors; else it does so in /tmp for ever."""
    return run_dir / "logs" / "torchrun"


def start_process(process: Process, report: Path) -> Running:
    """Starts a process under its guard; `report` is the path for its named error, in a folder that exists.

    Raises:
        ConfigError: its log cannot be written.
    """
    with _open_log(process.log_file) as log:
        log_start = log.tell()
        return Running(process, _start_guard(process, log, report), log_start, report)


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
            "async_rl.shared.programs.process_guard",
            "--cores",
            cores,
            "--grace-s",
            str(process.grace_s),
            *(() if process.stopped_after_s is None else ("--stopped-after-s", str(process.stopped_after_s))),
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
