"""One command of async-rl as a process that ends with this one, in whatever way this one ends.

What waits here: `wait`, for the end of the command; it is woken by that, or by `end`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO, Any, BinaryIO

from async_rl import errors
from async_rl.cli import PROGRAMS
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed, RunStopped
from async_rl.shared.files import named_write_errors
from async_rl.shared.programs.failure_report import VARIABLE, read_failure
from async_rl.shared.programs.parts import ROOT

POLL_S = 0.2

END_MARGIN_S = 30.0
"""Beyond the time that the command takes to end what it has started."""

NUM_LOG_LINES = 20

EVERY_VARIABLE = "ASYNC_RL_PROGRESS_EVERY"
"""As in `deploy.cluster.run_view`, which is not imported: a line of progress after so many iterations."""

OF_TERMINALS = frozenset({"CLICOLOR", "CLICOLOR_FORCE", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"})
"""Of a kernel, whose cells have colours: with them a command would draw its live view into its log."""

GUARD = "async_rl.shared.programs.process_guard"


class Command:
    """`async-rl NAME WORDS` under a guard, which reads the end of a pipe when this process ends, and then ends it.

    Args:
        log: a file that it prints to, open for adding to its end; if it is locked, it is until the command has ended.
        grace_s: how long it may take to end when it is asked to.
        shows: whether what it prints is printed here, too, as it comes.

    Raises:
        ConfigError: this program is no Python that could start another one.
    """

    def __init__(self, name: str, words: Sequence[str], log: BinaryIO, *, grace_s: float, shows: bool) -> None:
        if not sys.executable:
            raise ConfigError("sys.executable is empty: name the Python that has async-rl there")
        self.log = Path(log.name)
        self._log_start = log.seek(0, os.SEEK_END)
        self._name = name
        self._was_asked = False
        self._reports = tempfile.TemporaryDirectory(prefix="async-rl-python-", ignore_cleanup_errors=True)
        self._report = Path(self._reports.name) / "failure"
        python = (sys.executable, "-m")
        self._guard = subprocess.Popen(
            [*python, GUARD, "--grace-s", str(grace_s + END_MARGIN_S), "--", *python, PROGRAMS[name][0], *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**child_environment(os.environ), VARIABLE: str(self._report)},
            # Ctrl-C of a terminal is for this process, which ends the command in order.
            start_new_session=True,
        )
        _close_in_forks(self._guard.stdin)
        self._shown = threading.Thread(target=self._show, name=f"async-rl {name}", daemon=True)
        if shows:
            self._shown.start()

    @property
    def pid(self) -> int:
        """The guard's."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + N if signal N ended it."""
        code = self._guard.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether it has ended, and all that it printed is shown."""
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._shown.is_alive() and threading.current_thread() is not self._shown:
            self._shown.join()
        return True

    def end(self) -> None:
        """Asks it to end, and waits for that; a second call only waits. An interrupt ends the wait, not the end."""
        assert self._guard.stdin is not None, "the guard is started with a pipe"
        self._was_asked = self._was_asked or self.exit_code is None
        self._guard.stdin.close()
        self.wait()

    def failure(self) -> AsyncRLError | None:
        """The named error that it ended with; None if it succeeded, still runs, or was ended here."""
        code = self.exit_code
        if not code or self._was_asked:
            return None
        if reported := read_failure(self._report):
            return named_error(reported.kind, reported.message)
        if code == 128 + signal.SIGTERM:
            return RunStopped(f"async-rl {self._name} was ended by SIGTERM; its output is in {self.log}")
        lines = "\n".join(f"    {line}" for line in self.output().splitlines()[-NUM_LOG_LINES:])
        return ProcessFailed(f"async-rl {self._name} {how_it_ended(code)}; the end of {self.log}:\n{lines}")

    def output(self) -> str:
        """What it has printed so far."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode(errors="replace").rstrip()
        except OSError as error:
            return f"(it cannot be read: {error.strerror})"

    def _show(self) -> None:
        """Prints what the command prints, line by line, to whatever `sys.stdout` is then."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            while True:
                has_ended = self.exit_code is not None
                while line := file.readline():
                    # The rest of a line that is being written follows.
                    print(line.decode(errors="replace"), end="", flush=True)
                if has_ended:
                    return
                self.wait(POLL_S)


class Unflushable:
    """In place of sys.stderr at the end of a script: Python exits with 120 where a standard stream cannot be flushed
    after all handlers (see `sys.exit`). `os._exit` would leave out those of others."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a run of this program has failed")


def _close_in_forks(pipe: IO[bytes] | None) -> None:
    """The guard sees the end of the pipe only if no fork of this process, as a data loader's, holds it open."""
    held = weakref.ref(pipe)

    def close() -> None:
        if (file := held()) is not None:
            file.close()

    os.register_at_fork(after_in_child=close)


def open_log(path: Path) -> BinaryIO:
    """
    Raises:
        WriteFailed: it cannot be written.
    """
    with named_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """That of the commands, as the console script makes it; it finds async-rl where this process has it."""
    child = {name: value for name, value in environment.items() if name not in OF_TERMINALS}
    child |= {"PYTHONSAFEPATH": "1", EVERY_VARIABLE: "1"}
    # Of a kernel: a module of its own environment, which a process of another Python lacks.
    if child.get("MPLBACKEND", "").startswith("module://"):
        del child["MPLBACKEND"]
    try:
        distribution("async-rl")
    except PackageNotFoundError:
        child["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    return child


def named_error(kind: str, message: str) -> AsyncRLError:
    """The error of `async_rl.errors` of that name; of another name a `ProcessFailed` with it as its cause."""
    found = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, AsyncRLError)):
        return ProcessFailed(message, kind)
    # Some are made of more than a message, which their report does not have.
    return found.__new__(found, message)


def how_it_ended(code: int) -> str:
    number = code - 128
    if number in set(signal.Signals):
        return f"was ended by signal {number} ({signal.Signals(number).name})"
    return f"exited with code {code}"
