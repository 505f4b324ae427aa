"""How a launcher ends early: on a signal, or by an error of the run; it tells why, and its exit code."""

import itertools
import signal
from collections.abc import Mapping
from types import FrameType

from rich.console import Console
from rich.markup import escape

from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from async_rl.shared.programs.command_line import USAGE_ERROR
from async_rl.shared.programs.error_text import error_text
from async_rl.shared.programs.failure_report import report_failure


class Stopped(BaseException):
    """The deployer received a signal to stop; not an `Exception`, so that no handler mistakes it for a fault."""

    def __init__(self, signum: int, *, is_first: bool = True) -> None:
        """`is_first`: a further signal interrupts the wait for the processes, which their guards then end."""
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum
        self.is_first = is_first


def stop_on_signals() -> None:
    """Ctrl-C, SIGTERM and a closed terminal raise `Stopped` in the main thread: contexts then end their processes.

    With nohup, which has a program ignore that its terminal closes, that stays ignored. SIGINT does not: a shell has
    ignore it what a script starts in the background, and `kill -INT` must end that, too.
    """
    counter = itertools.count()

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise Stopped(signum, is_first=next(counter) == 0)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
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
    console.print(f"[bold red]{escape(kind)}[/]: {escape(error_text(end))}", highlight=False, soft_wrap=True)
    return USAGE_ERROR if kind == ConfigError.__name__ else 1


def report_end(end: Stopped | AsyncRLError, environment: Mapping[str, str]) -> None:
    """Tells the program that started this one, if it asked for that, by which error this one ends early."""
    if isinstance(end, AsyncRLError):
        report_failure(end, environment)
