"""Rendering, parsing and decoding for all rollouts of a leader, one at a time; long ones beside the event loop.

A rendering takes a millisecond: of a thousand at once, one goes through in each round of the loop. That of a text of
100,000 tokens takes 0.2 s, nearly all in a library that leaves the interpreter to others meanwhile. Renderers and
tokenizers are not for two threads at once, so whoever is inside stays there until the thread has finished, also if
nobody waits for it any more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

LONG = 2**15
"""Bytes to render, or tokens to parse or decode: 10 to 50 ms of a processor."""

Result = TypeVar("Result")


class Turnstile:
    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Waits for its turn, and then for the next round of the loop."""
        async with self._lock:
            await asyncio.sleep(0)
            yield

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """The result of `work`, for one who has entered.

        Args:
            size: see `LONG`; work that is longer is done in a thread, and has to allow that.
        """
        assert self._lock.locked(), "it has not entered"
        if size < LONG:
            return work()
        running = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(running)
        finally:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
