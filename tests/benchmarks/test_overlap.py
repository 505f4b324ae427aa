"""The overlap benchmark finds the pace at which generation and training take the same time."""

import pytest

from benchmarks.overlap import MAX_CALIBRATIONS, MAX_GROUPS, calibrate, ideal_speedup


def silent(line: str) -> None:
    pass


@pytest.mark.parametrize("training_s", [1.0, 2.0, 3.5, 6.0])
@pytest.mark.parametrize("step_s", [0.05, 0.2])
def test_calibration_balances_machines_on_which_either_side_is_faster(training_s: float, step_s: float) -> None:
    tried: list[int] = []

    def measure_at(groups: int) -> float:
        tried.append(groups)
        # Every group takes a part of a step that all at once share, and a part of its own.
        return (96 * step_s / groups + 0.5) / training_s

    chosen = calibrate(measure_at, silent)
    best = min(abs(measure_at(groups) - 1) for groups in range(1, MAX_GROUPS + 1))
    assert chosen in tried and abs(measure_at(chosen) - 1) <= best + 0.12
    assert len(set(tried[: MAX_CALIBRATIONS + 1])) <= MAX_GROUPS


def test_calibration_ends_where_no_pace_balances_both() -> None:
    tried: list[int] = []

    def measure_at(groups: int) -> float:
        tried.append(groups)
        return 5.0

    assert calibrate(measure_at, silent) in tried
    assert tried == [8, 32]


def test_ideal_speedup_is_two_only_where_both_take_the_same_time() -> None:
    assert ideal_speedup({"rollout_s": 2.0, "train_s": 2.0}) == 2.0
    assert ideal_speedup({"rollout_s": 2.7, "train_s": 3.5}) == pytest.approx(6.2 / 3.5)
