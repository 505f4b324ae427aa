"""The overlap benchmark finds the pace at which generation and training take the same time."""

import math

import pytest

from benchmarks.overlap import MAX_RESPONSES, PIECE, calibrate, ideal_speedup


def silent(line: str) -> None:
    pass


# Of an engine that is 15 times as fast as another, on machines whose training differs as much.
@pytest.mark.parametrize("training_s", [1.0, 2.0, 3.5, 6.0])
@pytest.mark.parametrize("step_s", [0.004, 0.02, 0.05])
def test_calibration_balances_whichever_side_is_faster(training_s: float, step_s: float) -> None:
    tried: list[int] = []

    def measure_at(responses: int) -> float:
        tried.append(responses)
        # Every response takes a part of a step that all at once share, and a part of its own.
        return (768 * 24 * step_s / responses / 8 + 0.5) / training_s

    chosen = calibrate(measure_at, silent)
    best = min(abs(math.log(measure_at(responses))) for responses in range(PIECE, MAX_RESPONSES + 1, PIECE))
    assert chosen in tried and abs(math.log(measure_at(chosen))) <= max(best, math.log(1.1))


def test_calibration_ends_where_no_pace_balances_both() -> None:
    tried: list[int] = []

    def measure_at(responses: int) -> float:
        tried.append(responses)
        return 5.0

    assert calibrate(measure_at, silent) in tried
    assert tried == [64, 256]


def test_ideal_speedup_is_two_only_where_both_take_the_same_time() -> None:
    assert ideal_speedup({"rollout_s": 2.0, "train_s": 2.0}) == 2.0
    assert ideal_speedup({"rollout_s": 2.7, "train_s": 3.5}) == pytest.approx(6.2 / 3.5)
