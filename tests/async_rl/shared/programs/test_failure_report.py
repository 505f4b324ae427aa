"""Which named error a process ended with, as the program that started it reads it."""

import json
import os
from itertools import permutations, product
from pathlib import Path

import pytest

from async_rl.errors import AsyncRLError, ConfigError, LeaderFailed, RewardError, RunStopped
from async_rl.shared.programs.failure_report import (
    NUM_RANKS_VARIABLE,
    TORCHRUN_VARIABLE,
    VARIABLE,
    Failure,
    read_failure,
    report_failure,
    report_unnamed_failure,
)


def test_without_anybody_who_asks_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report_failure(ConfigError("no such model"), {})
    assert list(tmp_path.iterdir()) == [] and read_failure(tmp_path / "failure") is None


def test_the_first_report_of_a_process_stays(tmp_path: Path) -> None:
    environment = {VARIABLE: str(tmp_path / "failure"), TORCHRUN_VARIABLE: str(tmp_path / "torchrun.json")}
    report_failure(ConfigError("no such model: 'ä'"), environment)
    report_failure(RewardError("later"), environment)
    assert read_failure(tmp_path / "failure") == Failure("ConfigError", "no such model: 'ä'", False)
    told = json.loads((tmp_path / "torchrun.json").read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "ConfigError: no such model: 'ä'"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"failure.{os.getpid()}", "torchrun.json"]


ERRORS: list[AsyncRLError] = [LeaderFailed("the leader failed"), RewardError("it raised"), ConfigError("no such row")]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_of_several_processes_the_first_error_that_is_no_consequence_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    for at, number in enumerate(order):
        monkeypatch.setattr("async_rl.shared.programs.failure_report.time.time", lambda at=at: 1000.0 + at)
        monkeypatch.setattr("async_rl.shared.programs.failure_report.os.getpid", lambda at=at: 77 + at)
        report_failure(ERRORS[number], {VARIABLE: str(tmp_path / "failure")})
    first = next(ERRORS[number] for number in order if number)
    assert read_failure(tmp_path / "failure") == Failure(type(first).__name__, str(first), first.may_pass)


def test_a_report_that_is_being_written_and_other_files_are_not_read(tmp_path: Path) -> None:
    for name in ("failure.12.partial", "failure.txt", "other.12", "failure"):
        (tmp_path / name).write_text("{")
    assert read_failure(tmp_path / "failure") is None


ENDS: dict[str, AsyncRLError | None] = {
    "stopped": RunStopped("told to end"),
    "raised": None,
    "led": LeaderFailed("the leader failed"),
    "reward": RewardError("it raised"),
}


@pytest.mark.parametrize("ends", [ends for number in (1, 2, 3) for ends in product((*ENDS, "killed"), repeat=number)])
def test_a_request_to_end_is_the_reason_only_if_no_rank_died_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[str, ...]
) -> None:
    """The ranks of one host, in the order of their ends; one that was killed reports nothing."""
    environment = {VARIABLE: str(tmp_path / "failure"), NUM_RANKS_VARIABLE: str(len(ends))}
    for at, end in enumerate(ends):
        monkeypatch.setattr("async_rl.shared.programs.failure_report.time.time", lambda at=at: 1000.0 + at)
        monkeypatch.setattr("async_rl.shared.programs.failure_report.os.getpid", lambda at=at: 77 + at)
        if end == "raised":
            report_unnamed_failure(environment)
        elif (error := ENDS.get(end)) is not None:
            report_failure(error, environment)
    found = read_failure(tmp_path / "failure")
    if "reward" in ends:
        assert found is not None and found.kind == "RewardError"
    elif "led" in ends:
        assert found is not None and found.kind == "LeaderFailed"
    elif ends[0] == "stopped" and "killed" not in ends:
        assert found is not None and found.kind == "RunStopped" and not found.may_pass
    else:
        assert found is None, "a fault, which the log shows"


def test_a_report_that_cannot_be_written_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = tmp_path / "gone"
    report_failure(
        RewardError("it hangs"), {VARIABLE: str(gone / "failure"), TORCHRUN_VARIABLE: str(gone / "torchrun")}
    )
    # Of this logger: what else runs in this process may log meanwhile.
    said = [record.levelname for record in caplog.records if record.name == report_failure.__module__]
    assert said == ["WARNING", "WARNING"]
    assert read_failure(gone / "failure") is None
