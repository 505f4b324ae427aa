"""One call to each of several instances, watched from another thread."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from async_rl.errors import EventLoopLost, InstanceError, InstanceUnreachable
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.instance_calls import InstanceCalls
from async_rl.shared import event_loop
from async_rl.shared.event_loop import EventLoopThread
from tests.support.members import ready_member


def outcome_of(kind: str, delay_s: float) -> object:
    async def call(member: Member) -> str:
        await asyncio.sleep(delay_s)
        if kind == "fails":
            raise InstanceError(f"{member.url} refuses")
        if kind == "hangs":
            await asyncio.Event().wait()
        return member.name

    return call


def calls_of(loop: EventLoopThread, *kinds: str) -> tuple[InstanceCalls[str], list[Member]]:
    members = [ready_member(f"m{i}") for i in range(len(kinds))]
    made = {
        member: outcome_of(kind, 0.03 * (len(kinds) - i))
        for i, (member, kind) in enumerate(zip(members, kinds, strict=True))
    }
    return InstanceCalls(loop, members, lambda member: made[member](member)), members  # type: ignore[operator]


def test_results_and_failures_are_told_apart_and_the_earliest_failure_comes_first(loop: EventLoopThread) -> None:
    calls, members = calls_of(loop, "fails", "answers", "fails", "answers")
    failures = calls.settle(20.0)
    assert list(failures) == [members[2], members[0]] and "refuses" in str(failures[members[0]])
    assert calls.results() == {members[1]: "m1", members[3]: "m3"} and not calls.cancel()


def test_who_hangs_is_given_up_after_the_timeout_and_counts_as_unreachable(loop: EventLoopThread) -> None:
    calls, members = calls_of(loop, "hangs", "answers")
    failures = calls.settle(2.0)
    assert list(failures) == [members[0]]
    assert isinstance(failures[members[0]], InstanceUnreachable) and "did not answer in time" in str(
        failures[members[0]]
    )
    assert calls.results() == {members[1]: "m1"}


def test_some_may_be_given_up_while_others_go_on(loop: EventLoopThread) -> None:
    calls, members = calls_of(loop, "hangs", "hangs", "answers")
    assert calls.cancel([members[0]])
    assert calls.results() == {} or calls.results() == {members[2]: "m2"}
    assert list(calls.failures()) == [members[0]]
    assert calls.cancel()


class LateFuture(concurrent.futures.Future[str]):
    """Whoever waits for it is woken before its callbacks run, as it happens when threads take turns just then."""

    def _invoke_callbacks(self) -> None:
        pass


class FailingLoop(EventLoopThread):
    """Every call fails, a moment after it was started."""

    def submit(self, coro: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        coro.close()
        future = LateFuture()
        threading.Timer(0.02, future.set_exception, [InstanceError("refuses")]).start()
        return future


def test_no_failure_is_missed_that_has_not_been_noted_yet() -> None:
    loop = FailingLoop()
    calls, members = calls_of(loop, "fails", "fails")
    assert calls.settle(None).keys() == set(members)
    loop.close()


def test_nobody_waits_for_calls_on_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave_them(_: asyncio.AbstractEventLoop) -> None:
        """Ends no call: as if the thread had ended by a fault."""

    monkeypatch.setattr(event_loop, "_cancel_all", leave_them)
    loop = EventLoopThread()
    calls, _ = calls_of(loop, "hangs")
    loop.close()
    with pytest.raises(EventLoopLost, match="has ended"):
        calls.settle(None)


def test_a_mistake_of_our_own_is_raised(loop: EventLoopThread) -> None:
    async def wrong(member: Member) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        InstanceCalls(loop, [ready_member("a")], wrong).settle(20.0)


def test_nobody_to_ask_is_done_at_once(loop: EventLoopThread) -> None:
    calls, _ = calls_of(loop)
    assert calls.settle(None) == {} and calls.results() == {} and not calls.cancel()
