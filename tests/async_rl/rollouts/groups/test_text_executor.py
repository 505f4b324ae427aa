"""Short work on the loop, one piece in a round; long work in a thread, one at a time; neither waits for the other."""

import asyncio
import threading

import pytest

from async_rl.rollouts.groups.text_executor import LONG, TextExecutor


def test_long_work_is_done_in_a_thread_and_short_work_on_the_loop() -> None:
    async def idents() -> list[object]:
        text_executor = TextExecutor()
        return [await text_executor.run(threading.get_ident, size) for size in (0, LONG - 1, LONG)]

    here = threading.get_ident()
    assert [ident == here for ident in asyncio.run(idents())] == [True, True, False]


@pytest.mark.parametrize("size", [0, LONG])
def test_an_error_of_the_work_reaches_who_asked_and_others_enter(size: int) -> None:
    async def fail() -> object:
        text_executor = TextExecutor()
        with pytest.raises(ZeroDivisionError):
            await text_executor.run(lambda: 1 / 0, size)
        return await text_executor.run(lambda: "done", size)

    assert asyncio.run(fail()) == "done"


@pytest.mark.parametrize("num_cancels", [1, 3])
def test_long_work_that_nobody_waits_for_any_more_keeps_other_out_until_it_has_ended(num_cancels: int) -> None:
    may_end, steps = threading.Event(), []

    def slow() -> None:
        steps.append("begun")
        assert may_end.wait(60)
        steps.append("ended")

    async def run() -> None:
        text_executor = TextExecutor()
        first = asyncio.create_task(text_executor.run(slow, LONG))
        while not steps:
            await asyncio.sleep(0.001)
        for _ in range(num_cancels):
            first.cancel()
            await asyncio.sleep(0.01)
        second = asyncio.create_task(text_executor.run(lambda: steps.append("second"), LONG))
        await asyncio.sleep(0.05)
        assert steps == ["begun"]
        may_end.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())
    assert steps == ["begun", "ended", "second"]


@pytest.mark.parametrize("size", [0, LONG])
def test_one_that_is_cancelled_before_its_turn_does_nothing(size: int) -> None:
    may_end = threading.Event()
    done: list[str] = []

    async def run() -> None:
        text_executor = TextExecutor()
        async with text_executor.entered():
            before = asyncio.create_task(text_executor.run(lambda: may_end.wait(60), LONG))
            waiting = asyncio.create_task(text_executor.run(lambda: done.append("work"), size))
            await asyncio.sleep(0.01)
            waiting.cancel()
        may_end.set()
        await asyncio.gather(before, waiting, return_exceptions=True)
        await text_executor.run(lambda: done.append("next"), size)

    asyncio.run(run())
    assert done == ["next"]


def test_short_work_goes_on_while_long_work_is_done() -> None:
    may_end = threading.Event()

    async def run() -> list[object]:
        text_executor = TextExecutor()
        long = asyncio.create_task(text_executor.run(lambda: may_end.wait(60), LONG))
        short = [await text_executor.run(lambda: "short", 0) for _ in range(3)]
        may_end.set()
        return [*short, await long]

    assert asyncio.run(run()) == ["short"] * 3 + [True]


def test_of_short_work_that_comes_at_once_one_piece_is_done_in_each_round_of_the_loop() -> None:
    rounds: list[int] = []

    async def run() -> None:
        text_executor, number = TextExecutor(), 0
        doing = [asyncio.create_task(text_executor.run(lambda: rounds.append(number), 0)) for _ in range(8)]
        while not all(task.done() for task in doing):
            number += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert len(set(rounds)) == len(rounds) == 8
