"""An asyncio loop in one background thread, so that the synchronous trainer can use asynchronous clients.

The producer's coroutines and the publisher's control calls run on it; the main thread only waits for results.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class EventLoopThread:
    """One running loop in a daemon thread. All methods are for other threads than the loop's own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="async-rl-event-loop", daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `coro` on the loop and returns at once; cancelling the future cancels it."""
        if self._closed:
            coro.close()
            raise RuntimeError("the event loop thread is closed: nothing can run on it any more")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs `coro` on the loop, waits for it, and returns its result or raises its error.

        Leaving the wait early (Ctrl-C, timeout) cancels the coroutine.

        Raises:
            TimeoutError: it took longer than `timeout_s`.
        """
        assert threading.current_thread() is not self._thread, "EventLoopThread.run would wait for itself"
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what still runs, waits until it has ended, and joins the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all(self._loop))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
