"""What the comparison counts; our side of it runs, on a case of seconds."""

import pytest

from benchmarks.common.case import Case
from benchmarks.peers.__main__ import Mark, run_ours, speed_between


def test_speeds_are_tokens_between_two_marks() -> None:
    speed = speed_between(Mark(10.0, 100.0), Mark(14.0, 102.0), 80)
    assert speed.per_cpu_s == 20.0 and speed.per_s == 40.0


@pytest.mark.distributed
def test_our_side_is_measured_in_a_real_run() -> None:
    speed = run_ours(Case.parse("tiny:20:2:2"), kl_coef=0.05, iterations=5)
    assert speed.per_cpu_s > 0 and speed.per_s > 0
