"""How the time of a call is divided among its responses."""

import pytest

from async_rl.rollouts.rewards.time_limit import SharedTime
from tests.support.clock import Clock


def test_each_response_has_an_equal_part_of_what_those_before_it_left() -> None:
    clock = Clock()
    time = SharedTime(12.0, 4, clock)
    assert time.next_s() == pytest.approx(3.0)
    clock.sleep(3.0)
    assert time.next_s() == pytest.approx(3.0)
    assert time.next_s() == pytest.approx(4.5), "the second has taken none"
    clock.sleep(4.5)
    assert time.next_s() == pytest.approx(4.5)


def test_a_call_whose_time_is_over_has_none_for_the_rest() -> None:
    clock = Clock()
    time = SharedTime(2.0, 2, clock)
    clock.sleep(5.0)
    assert [time.next_s() for _ in range(3)] == [0.0, 0.0, 0.0]
