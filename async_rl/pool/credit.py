"""How many responses an instance gets at once: enough to keep its engine full, never the whole batch. Pure."""

UNTOLD_AT_FIRST = 32
"""What an instance gets first that does not say how many responses it generates at once."""

UNTOLD_AT_MOST = 256
"""vLLM's own default of --max-num-seqs."""

QUEUE_S = 1.0
"""A request that got no token for so long, while others went on, waits in the instance's own queue."""

MAX_QUEUED = 2
"""Requests that wait there: one is needed so that the engine never runs empty, a second says that it is full."""


class Credit:
    """Of one instance.

    An engine's concurrency is full with as many responses as it says. Where it does not say, the credit doubles each
    time all of it is in use and its newest request gets its first token: so the engine took it in at once.
    """

    def __init__(self) -> None:
        self._found = UNTOLD_AT_FIRST

    def responses(self, told: int | None) -> int:
        """Responses under way at which it gets no further group; the last group may go beyond."""
        return told if told is not None else self._found

    def first_token(self, num_open: int, waited_s: float) -> None:
        """A request got its first token `waited_s` after it was sent, with `num_open` responses under way in all."""
        if num_open >= self._found and waited_s < QUEUE_S:
            self._found = min(2 * self._found, UNTOLD_AT_MOST)
