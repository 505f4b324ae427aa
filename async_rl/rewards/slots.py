"""How many calls of a reward may be under way at once; for `process_reward`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """A number of slots, taken in order of arrival; a call may take several."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free = asyncio.Semaphore(number)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, number: int) -> AsyncIterator[None]:
        """Waits for `number` slots, or for all if there are fewer."""
        num_taken = 0
        try:
            # One after the other: two calls that have a part of their slots each would wait for each other forever.
            async with self._turn:
                for _ in range(min(number, self._number)):
                    await self._free.acquire()
                    num_taken += 1
            yield
        finally:
            for _ in range(num_taken):
                self._free.release()
