"""Slots of calls that take several at once."""

import asyncio
import random

from async_rl.shared.workers.function import Slots


def test_never_more_slots_are_taken_than_there_are_and_none_waits_forever() -> None:
    async def run() -> int:
        slots, running, most = Slots(5), 0, 0
        draw = random.Random(1)

        async def call(number: int) -> None:
            nonlocal running, most
            async with slots.taken(number):
                running += min(number, 5)
                most = max(most, running)
                try:
                    await asyncio.sleep(0.001 * draw.random())
                finally:
                    running -= min(number, 5)

        calls = [asyncio.create_task(call(draw.randint(1, 8))) for _ in range(60)]
        for late in draw.sample(calls, 20):
            asyncio.get_running_loop().call_later(0.01 * draw.random(), late.cancel)
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        async with slots.taken(5):
            return most

    assert asyncio.run(run()) == 5
