"""One HTTP call to each of several instances concurrently, started and awaited by the main thread."""

import concurrent.futures
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from async_rl.errors import InstanceError, InstanceUnreachable
from async_rl.rollouts.pool.member import Member
from async_rl.shared.event_loop import POLL_S, EventLoopThread

T = TypeVar("T")


class InstanceCalls(Generic[T]):
    """Running calls on the event loop. Errors other than `InstanceError` are internal mistakes and are raised."""

    def __init__(
        self, loop: EventLoopThread, members: Sequence[Member], call: Callable[[Member], Coroutine[Any, Any, T]]
    ) -> None:
        self._loop = loop
        self._futures = {member: loop.submit(call(member)) for member in members}
        self._ended: list[Member] = []
        for member, future in self._futures.items():
            future.add_done_callback(partial(self._note_end, member))

    def _note_end(self, member: Member, _: concurrent.futures.Future[T]) -> None:
        self._ended.append(member)

    def failures(self) -> dict[Member, InstanceError]:
        """The calls that have failed so far, the earliest first; does not wait."""
        failed: dict[Member, InstanceError] = {}
        # Whoever waits for a future may be woken before the future's callback has noted its end.
        ended = dict.fromkeys(self._ended) | {m: None for m, future in self._futures.items() if future.done()}
        for member in ended:
            future = self._futures[member]
            error = future.exception() if not future.cancelled() else _gave_up(member)
            if isinstance(error, InstanceError):
                failed[member] = error
            elif error is not None:
                raise error
        return failed

    def wait(self, members: Iterable[Member]) -> None:
        """Waits until the calls of `members` have ended; raises as `settle`."""
        self._wait([self._futures[member] for member in members], None)

    def settle(self, timeout_s: float | None) -> dict[Member, InstanceError]:
        """Waits until every call has ended, cancels what has not within `timeout_s`, and returns the failures.

        Raises:
            EventLoopLost: the loop's thread has ended, and so nothing would end a call.
        """
        try:
            self._wait(self._futures.values(), timeout_s)
        finally:
            self.cancel()
        return self.failures()

    def _wait(self, futures: Collection[concurrent.futures.Future[T]], timeout_s: float | None) -> None:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not concurrent.futures.wait(futures, min(left_s, POLL_S)).not_done:
                return
            self._loop.require_alive()

    def results(self) -> dict[Member, T]:
        """Results of the calls that have succeeded."""
        return {m: f.result() for m, f in self._futures.items() if f.done() and not f.cancelled() and not f.exception()}

    def cancel(self, members: Iterable[Member] | None = None) -> bool:
        """Cancels running calls, all or those of `members`; returns whether any ran, now or before.

        They count as unreachable.
        """
        cancelled = [self._futures[member].cancel() for member in members or self._futures]
        return any(cancelled)


def _gave_up(member: Member) -> InstanceError:
    return InstanceUnreachable(f"instance {member.url} did not answer in time: the call was given up")
