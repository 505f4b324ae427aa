"""Stops new requests to an instance that has just failed one, then tries it with a single request. Pure.

    closed --failure--> open --after a pause--> half open (one trial) --success--> closed
                          ^-------------------------- failure, twice the pause ---'

One failure is one incident, however many requests it ends: requests sent before the circuit opened are not counted
again. An open circuit does not change the membership: running requests continue there, and nothing is barred.
"""

FIRST_PAUSE_S = 0.5
"""An engine that responds with 5xx because it is overloaded or changes its mode needs about this long."""

MAX_PAUSE_S = 8.0
"""A broken instance costs one trial in this many seconds; a repaired one is in use again after at most as long."""


class Circuit:
    """The circuit of one instance; times are seconds of a clock that the caller reads."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """The last failure, until a success."""
        self._pause_s = FIRST_PAUSE_S
        self._opened_s = 0.0
        self._trials = 0

    @property
    def is_closed(self) -> bool:
        return self.reason is None

    @property
    def is_tried(self) -> bool:
        """Whether a trial is under way."""
        return self._trials > 0

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until the next trial; 0 if one may be sent now."""
        return 0.0 if self.is_closed else max(0.0, self._opened_s + self._pause_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent to the instance now."""
        return self.is_closed or (self._trials == 0 and self.retry_in_s(now_s) == 0.0)

    def sent(self) -> None:
        """A request was sent: a trial, if the circuit is not closed."""
        self._trials += 0 if self.is_closed else 1

    def succeeded(self, sent_s: float) -> None:
        """A request sent at `sent_s` generated tokens; one sent before the failure proves nothing."""
        if not self.is_closed and sent_s >= self._opened_s:
            self.reset()

    def failed(self, now_s: float, sent_s: float, reason: str) -> None:
        """A request sent at `sent_s` failed."""
        if self.is_closed:
            self._pause_s = FIRST_PAUSE_S
        elif sent_s < self._opened_s:
            return
        else:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self.reason, self._opened_s, self._trials = reason, now_s, 0

    def ended(self, sent_s: float) -> None:
        """A request sent at `sent_s` is over. If it was the trial and has shown nothing about the instance, as it was
        slow, moved, cancelled or invalid itself, another one may be sent."""
        if sent_s >= self._opened_s:
            self._trials = 0

    def reset_trial(self) -> None:
        """The trial was cancelled before it was sent: another one may be."""
        self._trials = 0

    def reset(self) -> None:
        """Restores the initial state."""
        self.reason, self._pause_s, self._trials = None, FIRST_PAUSE_S, 0
