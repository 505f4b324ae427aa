"""Holds new requests back from an instance that has just failed one, and tries it again with a single one. Pure.

    closed --failure--> open --after a pause--> half open (one trial) --success--> closed
                          ^-------------------------- failure, twice the pause ---'

One failure is an incident, however many requests it ends: what was sent before the circuit opened is not counted again.
An open circuit is no change of membership: what the instance has begun goes on there, and nothing is barred.
"""

FIRST_PAUSE_S = 0.5
"""An engine that answers 5xx because it is overloaded or changes its mode needs about so long."""

MAX_PAUSE_S = 8.0
"""A broken instance costs one trial in so many seconds, and one that is repaired is in use again as soon."""


class Circuit:
    """Of one instance; times are seconds of a clock that the caller reads."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """What the last failure was, until a success."""
        self._pause_s = FIRST_PAUSE_S
        self._opened_s = 0.0
        self._trials = 0

    @property
    def is_closed(self) -> bool:
        return self.reason is None

    def retry_in_s(self, now_s: float) -> float:
        """Until the next trial; 0 where one may go now."""
        return 0.0 if self.is_closed else max(0.0, self._opened_s + self._pause_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether a request may go to the instance now."""
        return self.is_closed or (self._trials == 0 and self.retry_in_s(now_s) == 0.0)

    def sent(self) -> None:
        """A request goes out: a trial, where the circuit is not closed."""
        self._trials += 0 if self.is_closed else 1

    def succeeded(self, sent_s: float) -> None:
        """A request that was sent at `sent_s` made tokens; one of before the failure proves nothing."""
        if not self.is_closed and sent_s >= self._opened_s:
            self.reset()

    def failed(self, now_s: float, sent_s: float, reason: str) -> None:
        """A request that was sent at `sent_s` failed."""
        if self.is_closed:
            self._pause_s = FIRST_PAUSE_S
        elif sent_s < self._opened_s:
            return
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.reason, self._opened_s, self._trials = reason, now_s, 0

    def reset_trial(self) -> None:
        """The trial was called off before it said anything about the instance: there may be another."""
        self._trials = 0

    def reset(self) -> None:
        """The instance is as good as new."""
        self.reason, self._pause_s, self._trials = None, FIRST_PAUSE_S, 0
