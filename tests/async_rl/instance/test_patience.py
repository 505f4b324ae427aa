"""The time without progress is bounded, not the whole time."""

import asyncio
import time

import pytest

from async_rl.instance.patience import while_it_progresses


def test_as_long_as_it_progresses_it_may_take_any_time() -> None:
    async def scenario() -> None:
        last_s = time.monotonic()
        begun = last_s
        async with while_it_progresses(lambda: last_s, 0.3):
            while time.monotonic() - begun < 0.6:
                await asyncio.sleep(0.02)
                last_s = time.monotonic()

    asyncio.run(scenario())


@pytest.mark.parametrize("ago_s", [0.0, 0.1, 5.0])
def test_it_ends_once_the_last_progress_is_too_long_ago(ago_s: float) -> None:
    async def scenario() -> float:
        begun = time.monotonic()
        last_s = begun - ago_s
        with pytest.raises(TimeoutError):
            async with while_it_progresses(lambda: last_s, 0.2):
                await asyncio.Event().wait()
        return time.monotonic() - begun

    assert max(0.0, 0.2 - ago_s) - 0.01 <= asyncio.run(scenario()) < 5.0


def test_what_ends_by_itself_leaves_no_timer_and_its_own_error_is_raised() -> None:
    async def scenario() -> None:
        looks = 0

        def last_s() -> float:
            nonlocal looks
            looks += 1
            return time.monotonic() - 0.1

        with pytest.raises(KeyError):
            async with while_it_progresses(last_s, 0.15):
                raise KeyError
        after = looks
        await asyncio.sleep(0.2)
        assert looks == after

    asyncio.run(scenario())


def test_a_cancellation_from_beside_stays_one() -> None:
    async def scenario() -> None:
        async def patient() -> None:
            async with while_it_progresses(time.monotonic, 60.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(patient())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
