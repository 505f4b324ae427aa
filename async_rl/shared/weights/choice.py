"""Whether the receivers of a weight group are sent all weights or what has changed: whichever takes them less time.

`stream.py` reports what each publish took, and asks while it looks for changes. All weights are sent first, which tells
what they take over these links. What finding changes takes is told by a part of them: they are given up as soon as the
rest promises to take longer than all weights do. The other way is tried again from time to time, as links and steps
change: at a cost of about `BUDGET` of all publishes, and soon after a publish that was longer for once.
"""

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

WORTH = 0.5
"""Of the bytes of all: where changes have more, all are sent. The sender keeps the changes until it has all of them."""

JUDGED = 1 / 32
"""Of the bytes: after so many the time of all is estimated."""

UNNOTICED_S = 0.02
"""Changes may take so much longer than all weights: a publish has other calls that take as long, and the link is left
to others."""

BUDGET = 0.02
FEWEST = 8
"""Publishes of changes between two of all weights, at least."""


class Choice:
    """Of one group; times are of `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._takes_changes = False
        self._said: bool | None = None
        self._all_s: float | None = None
        self._changes_s = math.inf
        self._num_left = 0
        """Publishes until the other way is tried."""
        self._num_failures = 0
        """Of changes, one after the other."""
        self._began_s = self._once_s = 0.0
        self._num_bytes = self._compared_bytes = self._changed_bytes = 0

    def begin(self, num_bytes: int) -> bool:
        """Begins a publish of so many bytes to receivers that hold the last one: whether changes are looked for."""
        self._begin()
        self._num_bytes, self._compared_bytes, self._changed_bytes = num_bytes, 0, 0
        return self._all_s is not None and self._takes_changes == (self._num_left > 0)

    @property
    def keeps(self) -> bool:
        """Whether the publish after one of all weights may look for changes, and so needs to know what was sent."""
        return self._all_s is None or self._takes_changes or self._num_left <= 1

    def goes_on(self, compared_bytes: int, changed_bytes: int) -> bool:
        """Whether changes are worth it still, after further bytes were compared and so many of changes found."""
        self._compared_bytes += compared_bytes
        self._changed_bytes += changed_bytes
        if self._changed_bytes > WORTH * self._num_bytes:
            return False
        share = self._compared_bytes / self._num_bytes
        if share < JUDGED:
            return True
        assert self._all_s is not None, "changes are looked for once it is known what all take"
        took_s = self._clock() - self._began_s
        left_s = (took_s + self._all_s * self._changed_bytes / self._num_bytes) / share - took_s
        return left_s <= self._all_s + UNNOTICED_S

    def begin_all(self) -> float:
        """Begins to send all; returns the seconds that were lost on changes until then."""
        lost_s = self._clock() - self._began_s if self._compared_bytes else 0.0
        self._begin()
        self._compared_bytes = 0
        return lost_s

    def do_once(self, work: Callable[[], object]) -> None:
        """Does what a later publish of all weights will not have to."""
        began_s = self._clock()
        work()
        self._once_s += self._clock() - began_s

    def sent_all(self, lost_s: float) -> None:
        """All weights were sent, after so many seconds were lost on changes."""
        self._all_s = max(self._clock() - self._began_s - self._once_s, 0.0)
        if lost_s:
            how = f"changes were given up after {lost_s:.2f} s"
            self._settle(False, lost_s / max(self._all_s, lost_s * BUDGET), how)
        elif self._takes_changes:
            self._compare(self._all_s)
        elif self._num_left:
            self._num_left -= 1

    def sent_changes(self) -> None:
        assert self._all_s is not None, "changes are sent once it is known what all take"
        seconds = self._clock() - self._began_s
        self._changes_s = (self._changes_s + seconds) / 2 if self._takes_changes else seconds
        if not self._takes_changes or self._changes_s > self._all_s + UNNOTICED_S:
            self._compare(self._all_s)
        else:
            self._num_left -= 1

    def _begin(self) -> None:
        self._began_s, self._once_s = self._clock(), 0.0

    def _compare(self, all_s: float) -> None:
        least_s, most_s = sorted((all_s, self._changes_s))
        loss = (most_s - least_s) / least_s if least_s else 0.0
        self._settle(self._changes_s <= all_s + UNNOTICED_S, loss, f"changes {self._changes_s:.2f} s")

    def _settle(self, takes_changes: bool, loss: float, how: str) -> None:
        """`loss`: what it costs to try the other way, of a publish of this one."""
        self._num_left = math.ceil(loss / BUDGET)
        if takes_changes:
            self._num_left = max(self._num_left, FEWEST)
            self._num_failures = 0
        else:
            self._num_left = min(self._num_left, 2**self._num_failures)
            self._num_failures += 1
        if takes_changes != self._said:
            what = "what has changed" if takes_changes else "all weights"
            log.info("publishes send %s from now on: all weights took %.2f s, %s", what, self._all_s, how)
        self._takes_changes = self._said = takes_changes
