"""How long a member of a weight group did nothing: it says so itself, when the group breaks.

Its neighbours cannot: a member of a chain, or of a ring, waits for the next one, which may wait for another. The sender
says whom it leaves out by what the members say of themselves (`rollouts/publish/broadcast.py`).
"""

import threading
import time
import weakref

from async_rl.shared.protocol.group_errors import stood_still

LOOKS = 40
"""In the time of one timeout."""


class Pulse:
    """A thread that looks at the clock: what lies between two looks is time in which this process was stopped, or its
    machine was, or a call kept Python's lock."""

    def __init__(self, timeout_s: float) -> None:
        self._least_s = timeout_s / 2
        """Less has broken no group by itself, as a rule."""
        self._lock = threading.Lock()
        self.begin()
        # It ends with the last reference to this object.
        beating = (weakref.ref(self), timeout_s / LOOKS)
        threading.Thread(target=_beat, args=beating, name="async-rl-pulse", daemon=True).start()

    def begin(self) -> None:
        """Forgets what was."""
        with self._lock:
            self._longest_s, self._last = 0.0, time.monotonic()
            self._since = self._last

    def look(self) -> None:
        with self._lock:
            self._take(self._last)
            self._last = time.monotonic()

    def is_at_work(self, since_last: bool) -> None:
        """The member begins with its part, or has ended a piece of it: `since_last` counts what lies between as time
        in which it did nothing for the group."""
        with self._lock:
            if since_last:
                self._take(self._since)
            self._since = time.monotonic()

    def said(self) -> str:
        """The beginning of an error: the longest time; empty if that was too short to break anything."""
        self.look()
        return stood_still(self._longest_s) if self._longest_s >= self._least_s else ""

    def _take(self, since: float) -> None:
        self._longest_s = max(self._longest_s, time.monotonic() - since)


def _beat(pulse: "weakref.ref[Pulse]", every_s: float) -> None:
    while (present := pulse()) is not None:
        present.look()
        del present
        time.sleep(every_s)
