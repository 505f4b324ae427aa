"""Restarts of the training pods, as the first pod counts them in the attempts that JobSet numbers."""

import json
from pathlib import Path

import pytest

from async_rl.errors import RestartsExhausted
from deploy.cluster.restarts import Restarts
from deploy.kubernetes.training_pod import FILE, count_attempt


def attempt(run_dir: Path, number: int, *, trained: int = 0, limit: int = 2, cause: str | None = None) -> float:
    return count_attempt(run_dir, number, Restarts(limit), trained, cause)


def test_each_attempt_without_progress_waits_longer_and_the_last_one_is_refused(tmp_path: Path) -> None:
    assert [attempt(tmp_path, number) for number in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(
        RestartsExhausted, match=r"lost after 2 restarts .* \(cluster.max_restarts = 2\); the last time: broken"
    ):
        attempt(tmp_path, 3, cause="broken")


def test_progress_counts_from_zero_and_training_the_same_again_does_not(tmp_path: Path) -> None:
    assert [attempt(tmp_path, number, trained=4 * number) for number in range(10)] == [0.0] + [1.0] * 9
    assert attempt(tmp_path, 10, trained=36) == 2.0
    with pytest.raises(RestartsExhausted):
        attempt(tmp_path, 11, trained=36)


def test_a_pod_that_comes_back_in_the_same_attempt_was_evicted_and_counts_no_restart(tmp_path: Path) -> None:
    assert [attempt(tmp_path, number) for number in (0, 0, 1, 1, 1, 2)] == [0.0, 0.0, 1.0, 0.0, 0.0, 2.0]


def test_attempts_in_which_the_first_pod_did_not_start_count(tmp_path: Path) -> None:
    assert attempt(tmp_path, 2) == 2.0
    with pytest.raises(RestartsExhausted, match="a pod or its node was lost"):
        attempt(tmp_path, 4)


def test_another_launch_counts_anew(tmp_path: Path) -> None:
    for number in range(3):
        attempt(tmp_path, number)
    assert attempt(tmp_path, 0) == 0.0
    assert json.loads((tmp_path / FILE).read_text())["total"] == 0
    # Its first pod may not have started before its first restart.
    for number in range(3):
        attempt(tmp_path, number)
    assert attempt(tmp_path, 1) == 1.0


def test_without_restarts_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    assert attempt(tmp_path, 0, limit=0) == 0.0
    with pytest.raises(RestartsExhausted, match="lost after 0 restarts"):
        attempt(tmp_path, 1, limit=0)
