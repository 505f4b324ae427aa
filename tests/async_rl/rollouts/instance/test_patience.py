"""The time without progress is bounded, not the whole time."""

import asyncio
import time

import pytest

from async_rl.rollouts.instance.http import while_it_progresses
from tests.support import virtual_time


def test_as_long_as_it_progresses_it_may_take_any_time() -> None:
    async def scenario() -> None:
        last_s = time.monotonic()
        async with while_it_progresses(lambda: last_s, 30.0):
            for _ in range(100):
                await asyncio.sleep(29.0)
                last_s = time.monotonic()

    virtual_time.run(scenario())


@pytest.mark.parametrize("ago_s", [0.0, 10.0, 500.0])
def test_it_ends_once_the_last_progress_is_too_long_ago(ago_s: float) -> None:
    async def scenario() -> float:
        begun = time.monotonic()
        last_s = begun - ago_s
        with pytest.raises(TimeoutError):
            async with while_it_progresses(lambda: last_s, 20.0):
                await asyncio.Event().wait()
        return time.monotonic() - begun

    assert virtual_time.run(scenario()) == pytest.approx(max(0.0, 20.0 - ago_s))


def test_what_ends_by_itself_leaves_no_timer_and_its_own_error_is_raised() -> None:
    async def scenario() -> None:
        looks = 0

        def last_s() -> float:
            nonlocal looks
            looks += 1
            return time.monotonic() - 10.0

        with pytest.raises(KeyError):
            async with while_it_progresses(last_s, 15.0):
                raise KeyError
        after = looks
        await asyncio.sleep(60.0)
        assert looks == after

    virtual_time.run(scenario())


def test_a_cancellation_from_beside_stays_one() -> None:
    async def scenario() -> None:
        async def patient() -> None:
            async with while_it_progresses(time.monotonic, 60.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(patient())
        await asyncio.sleep(300.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual_time.run(scenario())
