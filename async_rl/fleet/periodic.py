"""A coroutine that runs periodically on the event loop, until it is stopped."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class Periodic:
    """Runs `once`, waits `interval_s`, and repeats. `once` handles its own faults; an exception ends the task."""

    def __init__(self, once: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._once = once
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self._task is None, "it runs already"
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Cancels the running task and waits until it has ended; does nothing if it was not started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._once()
            await asyncio.sleep(self._interval_s)


def _report(task: "asyncio.Task[None]") -> None:
    """Logs the task's error, since no code awaits the task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the inference pool ended", exc_info=error)
