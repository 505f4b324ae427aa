"""Limits the time without progress instead of the total time of an operation."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def while_it_progresses(last_progress_s: Callable[[], float], timeout_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError in its body once `last_progress_s()`, a `time.monotonic()`, is `timeout_s` ago."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal timer
            left_s = last_progress_s() + timeout_s - time.monotonic()
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                limit.reschedule(loop.time())

        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
