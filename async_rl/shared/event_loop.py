"""An asyncio loop in one background thread, so that the synchronous trainer can use asynchronous clients.

The producer's coroutines and the publisher's control calls run on it; the main thread only waits for results, and no
wait outlives the thread. User code does not run here: rewards run in processes of their own.
"""

import asyncio
import concurrent.futures
import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from async_rl.errors import EventLoopLost, WaitTimedOut

T = TypeVar("T")

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Cancelled coroutines close connections and wait for processes to be reaped, which takes a second or two."""

POLL_S = 1.0
"""How often a thread that waits for the loop checks that the loop's thread is alive."""


EVENTS_AT_ONCE = 8
"""Sockets that are served in one round of the loop. A thousand responses may end at the same time; the loop looks at
its timers, and at what others ask for, only between rounds."""


class FewAtOnce(selectors.DefaultSelector):
    """Returns some of the events that are there, and the others before it looks for further ones."""

    def __init__(self) -> None:
        super().__init__()
        self._left: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._left:
            self._left.extend(super().select(timeout))
        registered = self.get_map()
        found: list[tuple[selectors.SelectorKey, int]] = []
        while self._left and len(found) < EVENTS_AT_ONCE:
            key, events = self._left.popleft()
            # What was closed or changed meanwhile is another key, or none: what it has now, the next look finds.
            if registered.get(key.fd) is key:
                found.append((key, events))
        return found


class EventLoopThread:
    """One running loop in a daemon thread. All methods are for threads other than the loop's own."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop(FewAtOnce())
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="async-rl-event-loop", daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `coro` on the loop and returns immediately; cancelling the future cancels it."""
        if self._closed:
            coro.close()
            raise RuntimeError("the event loop thread is closed: nothing can run on it any more")
        try:
            self.require_alive()
        except EventLoopLost:
            coro.close()
            raise
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs `coro` on the loop, waits for it, and returns its result or raises its error.

        Leaving the wait early (Ctrl-C, timeout) cancels the coroutine.

        Raises:
            WaitTimedOut: it took longer than `timeout_s`; names the coroutine.
            EventLoopLost: the loop's thread ended, or the coroutine ended by `SystemExit` or a cancellation that the
                caller did not request.
        """
        assert threading.current_thread() is not self._thread, "EventLoopThread.run would wait for itself"
        name = getattr(coro, "__qualname__", repr(coro))
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        future = self.submit(coro)
        try:
            while not future.done():
                self.require_alive()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimedOut(
                        f"waited {timeout_s:g} s for {name}, which did not end: its connections or processes do not "
                        "answer; what is left of them ends with this process"
                    )
                concurrent.futures.wait([future], timeout=min(left, POLL_S))
            return _result(future, name)
        finally:
            future.cancel()

    def run_closing(self, coro: Coroutine[Any, Any, object], timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Runs a closing coroutine during shutdown: a failure or timeout is logged, so that it hides no other error."""
        try:
            self.run(coro, timeout_s)
        except Exception as error:
            log.error("closing: %s", error, exc_info=None if isinstance(error, WaitTimedOut) else error)

    def require_alive(self) -> None:
        """Checks that submitted coroutines can still finish.

        Raises:
            EventLoopLost: the loop's thread has ended.
        """
        if not self._thread.is_alive():
            raise EventLoopLost(
                "the thread of rollouts and instances has ended, and with it all that ran there: its last words are in "
                "the log above; go on from the checkpoint with run.resume = true"
            )

    def close(self) -> None:
        """Cancels the running coroutines, waits until they have ended, and joins the thread.

        Waits `CLOSE_TIMEOUT_S` at most and logs what has not ended by then; that ends with the process. A second call
        does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("the event loop's thread did not end within %g s: something blocks it", CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._closed:
                self._run_until_stopped()
            self._loop.run_until_complete(_cancel_all(self._loop))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _run_until_stopped(self) -> None:
        try:
            self._loop.run_forever()
        except BaseException:
            # asyncio re-raises a task's `SystemExit` or `KeyboardInterrupt` out of the loop; the other tasks continue.
            log.exception("a task tried to end the event loop, which goes on")


def _result(future: "concurrent.futures.Future[T]", name: str) -> T:
    """The result of a finished coroutine; an exception that would also end this thread becomes an error."""
    if future.cancelled():
        raise EventLoopLost(f"{name} was cancelled by something that runs beside it on the event loop")
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise EventLoopLost(f"{name} ended by {error!r}") from error
    return future.result()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    # Half of the available time, so that the loop can still be closed properly.
    _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S / 2)
    for task in late:
        log.error("a task did not end when it was cancelled: %r", task)
