"""docs/troubleshooting.md has every named error and every exit code."""

import inspect
import os
import re
import signal

from async_rl import errors
from async_rl.errors import AsyncRLError
from async_rl.shared.programs.command_line import USAGE_ERROR
from deploy.cluster.restarts import BAD_INPUT, DONE, FENCED, LASTING, NO_FLEET, STOPPED
from deploy.cluster.stopping import Stopped
from inference_service.__main__ import EXIT_CODES
from tests.support import ROOT
from trainer import process_end

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()


def test_every_named_error_is_listed_once_with_whether_a_restart_may_help() -> None:
    expected = {
        name: "yes" if kind.may_pass else "no"
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, AsyncRLError)
    }
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \| [^|]+ \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == len(expected) and dict(rows) == expected


def test_every_exit_code_is_listed() -> None:
    used = {
        *(DONE, USAGE_ERROR, BAD_INPUT, NO_FLEET, LASTING, FENCED, STOPPED, os.EX_TEMPFAIL),
        *(process_end.MAY_PASS, process_end.LASTING, process_end.FENCED),
        *EXIT_CODES.values(),
        *(Stopped(number).exit_code for number in (signal.SIGINT, signal.SIGTERM)),
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, flags=re.MULTILINE)} == used
