"""What the comparison counts; our side of it runs, on a case of seconds."""

import argparse

import pytest

from benchmarks.peers.__main__ import Mark, run_ours, speed_between
from benchmarks.peers.work import Case


def test_speeds_are_tokens_between_two_marks() -> None:
    speed = speed_between(Mark(10.0, 100.0), Mark(14.0, 102.0), 80)
    assert speed.per_cpu_s == 20.0 and speed.per_s == 40.0


@pytest.mark.parametrize("text", ["", "2M", "huge:1:1:1", "2M:1:1", "2M:0:1:1", "2M:1:1:1+ref"])
def test_a_case_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="SIZE:P:G:GROUPS"):
        Case.parse(text)


def test_a_case_is_written_as_it_is_read() -> None:
    for text in ("2M:80:8:16", "31M:512:8:8+kl"):
        assert str(Case.parse(text)) == text


@pytest.mark.distributed
def test_our_side_is_measured_in_a_real_run() -> None:
    speed = run_ours(Case.parse("tiny:20:2:2+kl"), iterations=5)
    assert speed.per_cpu_s > 0 and speed.per_s > 0
