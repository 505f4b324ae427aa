import threading
import traceback
from dataclasses import replace

import pytest

from async_rl.errors import EventLoopLost, OnPolicyViolation, RolloutLost
from async_rl.rollout.sample_queue import SampleQueue
from tests.support.groups import make_group


def test_queue_ends_after_exactly_its_groups_in_order_of_arrival() -> None:
    queue = SampleQueue(3, "v0")
    for index in (2, 0, 1):
        queue.put(make_group(index))
    assert [g.index for g in queue.ready(wait=True)] == [2, 0, 1]
    assert queue.ready(wait=True) == []


def test_consumer_that_does_not_wait_gets_what_is_there() -> None:
    queue = SampleQueue(2, "v0")
    assert queue.ready(wait=False) == []
    queue.put(make_group(1))
    assert [g.index for g in queue.ready(wait=False)] == [1]
    assert queue.ready(wait=False) == []


def test_consumer_waits_for_the_next_group() -> None:
    queue = SampleQueue(1, "v0")
    threading.Timer(0.1, queue.put, [make_group(0)]).start()
    assert len(queue.ready(wait=True)) == 1


def test_producers_error_surfaces_at_once_with_its_own_traceback() -> None:
    queue = SampleQueue(2, "v0")
    queue.put(make_group(0))
    try:
        raise KeyError("deep down")
    except KeyError as error:
        queue.fail(error)
    queue.fail(RuntimeError("a later one"))
    with pytest.raises(KeyError, match="deep down") as caught:
        queue.ready(wait=True)
    assert "test_producers_error" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_failure_wakes_a_waiting_consumer() -> None:
    queue = SampleQueue(1, "v0")
    threading.Timer(0.05, queue.fail, [RuntimeError("no more")]).start()
    with pytest.raises(RuntimeError, match="no more"):
        queue.ready(wait=True)


def test_close_wakes_a_waiting_consumer_and_lets_later_groups_go() -> None:
    queue = SampleQueue(2, "v0")
    queue.put(make_group(0))
    queue.ready(wait=True)
    threading.Timer(0.05, queue.close).start()
    with pytest.raises(RuntimeError, match="closed after 1 of 2 groups"):
        queue.ready(wait=True)
    queue.put(make_group(1))


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


def test_the_end_of_the_producers_ends_the_wait_for_what_is_missing() -> None:
    queue = SampleQueue(3, "v0")
    queue.put(make_group(0))
    assert len(queue.ready(wait=True)) == 1
    threading.Timer(0.05, queue.end).start()
    with pytest.raises(RolloutLost, match="2 of 3 rollouts ended without a group"):
        queue.ready(wait=True)


def test_the_end_of_the_producers_of_a_complete_batch_is_no_fault() -> None:
    queue = SampleQueue(1, "v0")
    queue.put(make_group(0))
    queue.end()
    assert len(queue.ready(wait=True)) == 1
    assert queue.ready(wait=True) == []


def test_a_waiting_consumer_looks_whether_there_is_still_something_to_wait_for() -> None:
    num_looks = 0

    def watch() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            raise EventLoopLost("the thread has ended")

    with pytest.raises(EventLoopLost):
        SampleQueue(1, "v0", watch).ready(wait=True)


def test_a_batch_ends_without_the_groups_that_were_cancelled() -> None:
    queue = SampleQueue(5, "v0")
    for index in (3, 0):
        queue.put(make_group(index))
    assert [g.index for g in queue.ready(wait=False)] == [3, 0]
    queue.put(make_group(1))  # finished, but not taken
    queue.cancel({1, 4})
    queue.put(make_group(4))
    queue.put(make_group(2))
    assert [g.index for g in queue.ready(wait=True)] == [2]
    assert queue.ready(wait=True) == []
    queue.end()
    assert queue.ready(wait=True) == []
    assert queue.is_cancelled(4) and not queue.is_cancelled(2)


def test_a_consumer_that_waits_is_woken_when_the_rest_is_cancelled() -> None:
    queue = SampleQueue(2, "v0")
    threading.Timer(0.1, queue.cancel, [{0, 1}]).start()
    assert queue.ready(wait=True) == []


def test_an_end_without_groups_that_were_not_cancelled_is_a_loss() -> None:
    queue = SampleQueue(3, "v0")
    queue.cancel({0})
    queue.put(make_group(1))
    queue.end()
    with pytest.raises(RolloutLost, match="1 of 2 rollouts"):
        queue.ready(wait=True)
