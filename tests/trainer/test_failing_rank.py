"""A rank that fails alone, wherever it is in an iteration: the other one learns of it, and neither hangs."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.method.types import Group
from async_rl.shared.checkpoint_names import newest_checkpoint
from tests.support.trainer import failing_rank_worker
from tests.support.trainer.failing_rank_worker import FAILS_AT, HANG_S, SCENARIOS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(HANG_S * 3)]

REWARD = "RewardError: no such column"
WRITE = "WriteFailed: cannot write "


@pytest.fixture(scope="module")
def ended(
    tiny_model: Callable[..., Path], ragged_groups: list[Group], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The directory with that of each scenario."""
    directory = tmp_path_factory.mktemp("failing")
    (directory / "groups").write_bytes(pickle.dumps(ragged_groups))
    command = (sys.executable, "-m", failing_rank_worker.__name__, tiny_model("qwen3"), directory / "groups", directory)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    subprocess.run(command, env=environment, timeout=HANG_S * 2.5, check=True)
    return directory


def said(ended: Path, scenario: str) -> list[str]:
    """What each rank ended with, or has trained."""
    return [json.loads((ended / scenario / f"rank-{rank}.json").read_text()) for rank in range(2)]


def saved(ended: Path, scenario: str) -> str | None:
    newest = newest_checkpoint(ended / scenario / "checkpoints")
    return None if newest is None else newest.name


@pytest.mark.parametrize("scenario", ["rollouts", "rollouts, while the other waits for totals"])
def test_where_a_replicas_rollouts_fail_both_save_the_last_whole_iteration(ended: Path, scenario: str) -> None:
    assert said(ended, scenario) == [f"LeaderFailed: another training rank: {REWARD}", REWARD]
    assert saved(ended, scenario) == f"iteration-{FAILS_AT:06}"


@pytest.mark.parametrize(
    ("lost", "nothing"), [("producer", "nothing"), ("producer of one replica", "nothing in one replica")]
)
def test_where_one_rank_loses_the_producer_both_repeat_the_iteration_with_the_weights_they_have(
    ended: Path, lost: str, nothing: str
) -> None:
    """The other one trains its own groups meanwhile, or those of the one that lost it."""
    assert said(ended, lost) == said(ended, nothing)
    assert len(said(ended, lost)[0]) == 64, "a digest of the weights"


def test_where_the_proof_cannot_be_written_both_save_the_last_whole_iteration(ended: Path) -> None:
    main, other = said(ended, "proof")
    assert main.startswith(WRITE) and other == f"LeaderFailed: another training rank: {main}"
    assert saved(ended, "proof") == f"iteration-{FAILS_AT:06}"


@pytest.mark.parametrize("scenario", ["record", "last record"])
def test_where_a_record_cannot_be_written_both_save_its_iteration(ended: Path, scenario: str) -> None:
    main, other = said(ended, scenario)
    assert main.startswith(WRITE) and other == f"LeaderFailed: another training rank: {main}"
    assert saved(ended, scenario) == f"iteration-{SCENARIOS[scenario].fails_at + 1:06}"


def test_where_a_publish_ends_with_the_run_both_save_the_last_whole_iteration(ended: Path) -> None:
    assert said(ended, "end while a publish waits") == ["RunStopped: told to end"] * 2
    assert saved(ended, "end while a publish waits") == f"iteration-{FAILS_AT:06}"


@pytest.mark.parametrize("scenario", ["directory of a checkpoint", "name of a checkpoint"])
def test_where_the_main_rank_cannot_write_a_checkpoint_both_end_by_name(ended: Path, scenario: str) -> None:
    main, other = said(ended, scenario)
    assert main.startswith(WRITE) and other == main


def test_a_save_that_hangs_ends_with_the_exit_code_of_what_ended_the_run(ended: Path) -> None:
    assert json.loads((ended / "hang.json").read_text()) == 4
