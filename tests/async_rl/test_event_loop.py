import asyncio
import threading

import pytest

from async_rl.event_loop import EventLoopThread


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail() -> None:
    raise ValueError("from the loop")


def test_run_returns_the_result_of_a_coroutine_on_another_thread(loop: EventLoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert loop.run(doubled(21)) == 42
    assert loop.run(name()) != threading.current_thread().name


def test_run_raises_the_coroutines_error(loop: EventLoopThread) -> None:
    with pytest.raises(ValueError, match="from the loop"):
        loop.run(fail())


def test_run_cancels_what_takes_longer_than_its_timeout(loop: EventLoopThread) -> None:
    ended = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        loop.run(hang(), timeout_s=0.05)
    assert ended.wait(5)


def test_close_ends_what_still_runs_and_refuses_more() -> None:
    loop = EventLoopThread()
    started, ended = threading.Event(), threading.Event()

    async def hang() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    future = loop.submit(hang())
    assert started.wait(5)
    loop.close()
    assert ended.is_set() and future.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(doubled(1))
    loop.close()
