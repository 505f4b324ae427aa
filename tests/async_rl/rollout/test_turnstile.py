"""One works at a time, long work in a thread, and nobody enters before that has ended."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from async_rl.rollout.turnstile import LONG, Turnstile


async def work(turnstile: Turnstile, do: Callable[[], object], size: int = LONG) -> object:
    async with turnstile.entered():
        return await turnstile.run(do, size)


def test_long_work_is_done_in_a_thread_and_short_work_on_the_loop() -> None:
    async def idents() -> list[object]:
        turnstile = Turnstile()
        return [await work(turnstile, threading.get_ident, size) for size in (0, LONG - 1, LONG)]

    here = threading.get_ident()
    assert [ident == here for ident in asyncio.run(idents())] == [True, True, False]


@pytest.mark.parametrize("size", [0, LONG])
def test_an_error_of_the_work_reaches_who_asked_and_others_enter(size: int) -> None:
    async def fail() -> object:
        turnstile = Turnstile()
        with pytest.raises(ZeroDivisionError):
            await work(turnstile, lambda: 1 / 0, size)
        return await work(turnstile, lambda: "done", size)

    assert asyncio.run(fail()) == "done"


@pytest.mark.parametrize("num_cancels", [1, 3])
def test_work_that_nobody_waits_for_any_more_keeps_others_out_until_it_has_ended(num_cancels: int) -> None:
    may_end, steps = threading.Event(), []

    def slow() -> None:
        steps.append("begun")
        assert may_end.wait(60)
        steps.append("ended")

    async def run() -> None:
        turnstile = Turnstile()
        first = asyncio.create_task(work(turnstile, slow))
        while not steps:
            await asyncio.sleep(0.001)
        for _ in range(num_cancels):
            first.cancel()
            await asyncio.sleep(0.01)
        second = asyncio.create_task(work(turnstile, lambda: steps.append("second"), 0))
        await asyncio.sleep(0.05)
        assert steps == ["begun"]
        may_end.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())
    assert steps == ["begun", "ended", "second"]


def test_one_that_is_cancelled_before_its_turn_does_nothing() -> None:
    done: list[str] = []

    async def run() -> None:
        turnstile = Turnstile()
        async with turnstile.entered():
            waiting = asyncio.create_task(work(turnstile, lambda: done.append("work")))
            await asyncio.sleep(0.01)
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await work(turnstile, lambda: done.append("next"))

    asyncio.run(run())
    assert done == ["next"]
