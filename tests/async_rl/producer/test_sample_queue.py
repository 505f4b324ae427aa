from dataclasses import replace

import pytest

from async_rl.errors import OnPolicyViolation, RolloutLost
from async_rl.producer.sample_queue import SampleQueue
from tests.support.groups import make_group


def test_groups_are_taken_in_order_of_arrival_and_once() -> None:
    queue = SampleQueue(3, "v0")
    assert queue.take() == []
    for index in (2, 0):
        queue.put(make_group(index))
    assert [g.index for g in queue.take()] == [2, 0] and not queue.has_all
    queue.put(make_group(1))
    assert queue.has_all and [g.index for g in queue.take()] == [1]
    assert queue.take() == []


def test_group_of_another_version_is_refused() -> None:
    queue = SampleQueue(1, "v2")
    with pytest.raises(OnPolicyViolation, match=r"group 0 .*p0.*'v0'.*'v2'"):
        queue.put(make_group(0))
    with pytest.raises(OnPolicyViolation, match="v0"):
        queue.put(replace(make_group(0), weight_version="v2"))


def test_duplicate_and_surplus_groups_are_refused() -> None:
    queue = SampleQueue(1, "v0")
    queue.put(make_group(4))
    with pytest.raises(OnPolicyViolation, match="came twice"):
        queue.put(make_group(4))
    with pytest.raises(OnPolicyViolation, match="after all 1 groups"):
        queue.put(make_group(5))


def test_an_end_without_all_groups_is_a_loss() -> None:
    queue = SampleQueue(3, "v0")
    queue.put(make_group(0))
    with pytest.raises(RolloutLost, match="2 of 3 rollouts ended without a group"):
        queue.end()
    for index in (1, 2):
        queue.put(make_group(index))
    queue.end()


def test_a_batch_ends_without_the_groups_that_were_cancelled() -> None:
    queue = SampleQueue(5, "v0")
    for index in (3, 0):
        queue.put(make_group(index))
    assert [g.index for g in queue.take()] == [3, 0]
    queue.put(make_group(1))  # Arrived, but not taken.
    queue.cancel({1, 4})
    queue.put(make_group(4))
    with pytest.raises(RolloutLost, match="1 of 3 rollouts"):
        queue.end()
    queue.put(make_group(2))
    assert queue.has_all and [g.index for g in queue.take()] == [2]
    queue.end()
