from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from async_rl.errors import OnPolicyViolation, RolloutLost
from async_rl.method.pieces import cut
from async_rl.producer.sample_queue import SampleQueue
from tests.support.groups import make_group, random_group

Needed = Sequence[Collection[int]] | None


def indices(queue: SampleQueue) -> list[int]:
    return [group.index for group in queue.pop_groups()]


def test_groups_are_taken_in_order_of_arrival_and_once() -> None:
    queue = SampleQueue([range(3)], "v0")
    assert queue.pop_groups() == []
    for index in (2, 0):
        queue.put(make_group(index))
    assert indices(queue) == [2, 0] and not queue.has_all and not queue.ends_mini_batch()
    queue.put(make_group(1))
    assert queue.has_all and indices(queue) == [1] and queue.pop_groups() == []
    queue.complete(0)
    assert queue.ends_mini_batch() and queue.pop_groups() == []


@pytest.mark.parametrize("needed", [None, [(), ()]])
def test_what_comes_early_for_the_next_mini_batch_waits_until_this_one_ends(needed: Needed) -> None:
    queue = SampleQueue([(0, 1), (2, 3)], "v0", needed=needed)
    for index in (1, 0):
        queue.put(make_group(index))
    queue.complete(0)
    queue.put(make_group(3))
    assert indices(queue) == [1, 0] and indices(queue) == []
    assert queue.ends_mini_batch() and indices(queue) == [3] and not queue.ends_mini_batch()
    queue.put(make_group(2))
    queue.complete(1)
    assert indices(queue) == [2] and queue.ends_mini_batch() and queue.has_all


def test_a_replica_may_get_a_part_of_a_mini_batch_or_none_of_it() -> None:
    queue = SampleQueue([(0, 1, 2), (3, 4)], "v0", needed=[(), ()])
    queue.put(make_group(1))
    queue.complete(0)
    queue.complete(1)
    assert indices(queue) == [1] and queue.ends_mini_batch()
    assert indices(queue) == [] and queue.ends_mini_batch()


def test_group_of_another_version_is_refused() -> None:
    queue = SampleQueue([[0]], "v2")
    with pytest.raises(OnPolicyViolation, match=r"group 0 .*p0.*'v0'.*'v2'"):
        queue.put(make_group(0))
    with pytest.raises(OnPolicyViolation, match="v0"):
        queue.put(replace(make_group(0), weight_version="v2"))


@pytest.mark.parametrize("needed", [None, [(), ()]])
def test_duplicate_surplus_and_misplaced_groups_are_refused(needed: Needed) -> None:
    queue = SampleQueue([[4], [5]], "v0", needed=needed)
    queue.put(make_group(4))
    with pytest.raises(OnPolicyViolation, match="came twice"):
        queue.put(make_group(4))
    for index in (5, 6):
        with pytest.raises(OnPolicyViolation, match="came to mini-batch 0, of which it is none"):
            queue.put(make_group(index))
    queue.complete(0)
    with pytest.raises(OnPolicyViolation, match="came twice"):
        queue.put(make_group(4))
    queue.put(make_group(5))
    queue.complete(1)
    with pytest.raises(OnPolicyViolation, match="after all 2 groups"):
        queue.put(make_group(7))


def test_an_end_without_all_groups_is_a_loss_where_no_other_replica_gets_them() -> None:
    queue = SampleQueue([range(3)], "v0")
    queue.put(make_group(0))
    with pytest.raises(RolloutLost, match="2 of 3 rollouts ended without a group"):
        queue.complete(0)
    for index in (1, 2):
        queue.put(make_group(index))
    queue.complete(0)


def test_pieces_of_a_group_come_where_others_may_and_each_of_its_rollouts_once() -> None:
    group = random_group(1, 3, (4, 5, 6))
    first, rest = cut(group, 1)
    for needed in ([(0,)], [(1,)]):
        queue = SampleQueue([(0, 1)], "v0", needed=needed)
        queue.put(rest)
        for again in (rest, group):
            with pytest.raises(OnPolicyViolation, match=r"group 1 .*came twice"):
                queue.put(again)
        queue.put(first)
        assert queue.pop_groups() == [rest, first] and queue.has_all == (needed == [(1,)])
    with pytest.raises(RolloutLost, match="1 of 2 rollouts"):
        SampleQueue([(0, 1)], "v0", needed=[(1,)]).complete(0)


def test_a_batch_ends_without_the_groups_that_were_cancelled() -> None:
    queue = SampleQueue([range(5)], "v0")
    for index in (3, 0):
        queue.put(make_group(index))
    assert indices(queue) == [3, 0]
    queue.put(make_group(1))  # Arrived, but not taken.
    queue.cancel({1, 4})
    queue.put(make_group(4))
    with pytest.raises(RolloutLost, match="1 of 5 rollouts"):
        queue.complete(0)
    queue.put(make_group(2))
    assert queue.has_all and indices(queue) == [2]
    queue.complete(0)
