"""How the process of a training rank ends: with which exit code, and at once where nothing must be saved."""

import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from async_rl.errors import AsyncRLError, ConfigError, Fenced, RunStopped
from async_rl.shared.programs.command_line import USAGE_ERROR
from async_rl.shared.programs.failure_report import report_failure
from async_rl.shared.programs.process_guard import end_with_parent

log = logging.getLogger("trainer")

MAY_PASS = 1
LASTING = 4
FENCED = 5


def exit_code_of(error: AsyncRLError) -> int:
    """The trainer's exit code after `error`; see `trainer.__main__`."""
    if isinstance(error, RunStopped):
        return 128 + signal.SIGTERM
    if isinstance(error, Fenced):
        return FENCED
    if error.may_pass:
        return MAY_PASS
    return USAGE_ERROR if isinstance(error, ConfigError) else LASTING


def end_with_torchrun(environment: Mapping[str, str] = os.environ) -> None:
    """Has Linux kill this process when torchrun, its parent, dies without ending it, as by `kill -9`; does nothing if
    torchrun did not start it.

    Its ranks have sessions of their own, so nobody else would: a rank that waits for torchrun's store would do so for
    hours. A lifeline exists only later, and no checkpoint can be saved without the store.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        end_with_parent()


def end_now(error: AsyncRLError, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Ends this process from any thread, without closing or saving anything; reports and logs `error`."""
    report_failure(error, environment)
    log.critical("%s: %s", type(error).__name__, error)
    logging.shutdown()
    if sys.stderr is not None:
        sys.stderr.flush()
    os._exit(exit_code_of(error))
