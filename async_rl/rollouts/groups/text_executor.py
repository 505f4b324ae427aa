"""Rendering, parsing and decoding for all rollouts of a run: short work on the event loop, long work in a thread.

A rendering takes a millisecond: of a thousand at once, one goes through in each round of the loop. That of a text of
100,000 tokens takes 0.2 s, nearly all in a library that leaves the interpreter to others meanwhile: one after the other
is done in a thread, and short work does not wait for it. Whoever is in the thread stays there until it has finished,
also if nobody waits for it any more.

Both are served in the order of arrival. A rollout brings one piece of work at a time (`session`), so each of them has
the same share, however much one of them asks for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

LONG = 2**15
"""Bytes to render, or tokens to parse or decode: 10 to 50 ms of a processor."""

Result = TypeVar("Result")


class TextExecutor:
    def __init__(self) -> None:
        self._loop_lock = asyncio.Lock()
        self._thread_lock = asyncio.Lock()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """For short work: waits for its turn, and then for the next round of the loop."""
        async with self._loop_lock:
            await asyncio.sleep(0)
            yield

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """The result of `work`, in its turn.

        Args:
            size: see `LONG`; work that is longer is done in a thread, beside short work, and has to allow that.
        """
        if size < LONG:
            async with self.entered():
                return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The result of long work, in its turn."""
        async with self._thread_lock:
            running = asyncio.get_running_loop().run_in_executor(None, work)
            try:
                return await asyncio.shield(running)
            finally:
                while not running.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([running])
