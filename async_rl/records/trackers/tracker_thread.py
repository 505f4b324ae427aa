"""One tracker in a thread of its own, behind a bounded queue: it cannot slow or end the run, whatever it does.

`put` returns at once; what does not fit is dropped. The thread waits for the next item, which the recorders put, and
ends with `close`, which waits `CLOSE_TIMEOUT_S` at most; a thread that hangs is left behind.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from async_rl.records.trackers.logged_steps import LoggedSteps
from async_rl.records.trackers.tracker import Tracker

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Items: several hundred iterations, for a tracker that does not answer for a while."""

CLOSE_TIMEOUT_S = 20.0
"""For all that a tracker has not sent at the end of a run."""

Item = tuple[str, int, Callable[[Tracker], None]]
"""(kind, step, what to call)."""


class TrackerThread:
    """Makes the tracker in the thread, since that may take long, too."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        logged: LoggedSteps | None = None,
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`logged`: of a tracker that cannot take steps back; those that it has are not logged again."""
        self._name = name
        self._make = make
        self._logged = logged
        self._waiting: queue.Queue[Item | None] = queue.Queue(max_waiting)
        self._is_closing = False
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name=f"async-rl-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Never waits and never raises."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._lose(f"it is {self._waiting.maxsize} items behind")

    def begin_close(self) -> float:
        """Lets the thread end after what is waiting; returns the `time.monotonic()` until which that may take."""
        self._is_closing = True
        # Where there is no room for it, the thread sees `_is_closing` with the next item.
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        return time.monotonic() + CLOSE_TIMEOUT_S

    def end(self, deadline_s: float) -> None:
        """Waits until the thread has ended, or until the deadline, and reports what was not logged."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.error("tracker %s did not end within %.0f s: the last iterations may be missing there", *self._at_end)
        elif self._num_lost:
            log.error("tracker %s missed %d entries; metrics.jsonl has them all", self._name, self._num_lost)

    @property
    def _at_end(self) -> tuple[str, float]:
        return self._name, CLOSE_TIMEOUT_S

    def _run(self) -> None:
        try:
            tracker = self._make()
        # A foreign library: whatever it raises must not end the run. SystemExit, too, would end this thread unnoticed.
        except BaseException as error:
            self._lose(f"it did not start: {type(error).__name__}: {error}")
            self._discard_all()
            return
        while (item := self._next()) is not None:
            self._handle(tracker, item)
        try:
            tracker.close()
        except BaseException as error:
            self._lose(f"it did not close: {type(error).__name__}: {error}")

    def _next(self) -> Item | None:
        """The next item; None when the queue is empty and closing."""
        while True:
            try:
                return self._waiting.get(timeout=0.5 if self._is_closing else None)
            except queue.Empty:
                return None

    def _handle(self, tracker: Tracker, item: Item) -> None:
        kind, step, call = item
        if self._logged is not None and not self._logged.is_new(kind, step):
            return
        try:
            call(tracker)
            if self._logged is not None:
                self._logged.mark_logged(kind, step)
        except BaseException as error:
            self._lose(f"{type(error).__name__}: {error}")

    def _discard_all(self) -> None:
        while self._next() is not None:
            self._num_lost += 1

    def _lose(self, reason: str) -> None:
        """Counts a lost entry; reports the first."""
        self._num_lost += 1
        if self._num_lost == 1:
            log.error("tracker %s: %s; the run goes on, and metrics.jsonl has every record", self._name, reason)
