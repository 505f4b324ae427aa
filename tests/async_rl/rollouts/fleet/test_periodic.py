"""A coroutine that is run again and again until it is stopped."""

import asyncio
import logging

import pytest

from async_rl.rollouts.fleet.dns import Periodic


def test_it_runs_again_and_again_and_not_after_it_was_stopped() -> None:
    async def scenario() -> None:
        num = 0

        async def once() -> None:
            nonlocal num
            num += 1

        periodic = Periodic(once, 0.001)
        await periodic.stop()
        for _ in range(2):
            await periodic.start()
            before = num
            while num < before + 3:
                await asyncio.sleep(0.001)
            await periodic.stop()
            after = num
            await asyncio.sleep(0.02)
            assert num == after
        await periodic.stop()

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_to_stop_it_ends_what_is_under_way_and_waits_for_its_end() -> None:
    async def scenario() -> None:
        began, ended = asyncio.Event(), False

        async def once() -> None:
            nonlocal ended
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ended = True

        periodic = Periodic(once, 0.001)
        await periodic.start()
        with pytest.raises(AssertionError, match="it runs already"):
            await periodic.start()
        await began.wait()
        await periodic.stop()
        assert ended

    asyncio.run(asyncio.wait_for(scenario(), 20.0))


def test_a_fault_ends_it_and_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def once() -> None:
            raise RuntimeError("no such thing")

        periodic = Periodic(once, 0.001)
        await periodic.start()
        while "no such thing" not in caplog.text:
            await asyncio.sleep(0.001)
        await periodic.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(scenario(), 20.0))
