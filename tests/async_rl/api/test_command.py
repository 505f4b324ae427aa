"""What a command gets from the process that starts it, and what comes back of its end."""

import os
import signal
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import pytest

from async_rl.api import command
from async_rl.api.command import EVERY_VARIABLE, child_environment, how_it_ended, named_error
from async_rl.errors import ConfigError, InstanceRefused, ProcessFailed, RewardError
from deploy.cluster import run_view


def test_a_command_gets_nothing_of_a_kernel_and_is_safe_from_the_working_directory() -> None:
    of_kernel = {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    child = child_environment({**of_kernel, "HOME": "/home/me"})
    assert not of_kernel.keys() & child.keys()
    assert (child["HOME"], child["PYTHONSAFEPATH"]) == ("/home/me", "1")
    assert child_environment({"MPLBACKEND": "agg"})["MPLBACKEND"] == "agg"
    assert EVERY_VARIABLE == run_view.EVERY_VARIABLE


def test_a_checkout_that_is_not_installed_is_found_by_its_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "distribution", missing)
    assert child_environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{command.ROOT}{os.pathsep}/mine"


def test_errors_come_back_by_their_names() -> None:
    for kind in (RewardError, ConfigError, InstanceRefused):
        error = named_error(kind.__name__, "what happened")
        assert type(error) is kind and str(error) == "what happened"
    for name in ("NoSuchError", "ClassVar"):
        error = named_error(name, "what happened")
        assert isinstance(error, ProcessFailed) and error.cause == name


def test_the_end_of_a_process_is_said_in_words() -> None:
    assert how_it_ended(3) == "exited with code 3"
    assert how_it_ended(128 + signal.SIGKILL) == "was ended by signal 9 (SIGKILL)"


def test_a_program_that_cannot_start_another_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with Path(os.devnull).open("ab") as log, pytest.raises(ConfigError, match=r"sys.executable is empty"):
        command.Command("run", [], log, grace_s=1.0, shows=False)
