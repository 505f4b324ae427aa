"""How many responses an instance gets concurrently: enough to keep its engine full, never the whole batch. Pure."""

UNTOLD_AT_FIRST = 32
"""The initial credit of an instance that does not report its concurrency."""

UNTOLD_AT_MOST = 256
"""vLLM's own default of --max-num-seqs."""

QUEUE_S = 1.0
"""A request without a token for this long, while others progressed, waits in the instance's own queue."""

MAX_QUEUED = 2
"""Requests waiting there: one is needed so that the engine never runs empty, a second shows that it is full."""


class Credit:
    """The credit of one instance.

    An engine is full with as many responses as its reported concurrency. If it reports none, the credit doubles each
    time all of it is in use and the newest request gets its first token soon: the engine started it immediately.
    """

    def __init__(self) -> None:
        self._found = UNTOLD_AT_FIRST

    def responses(self, told: int | None) -> int:
        """Unfinished responses at which it gets no further group; the last group may exceed it."""
        return told if told is not None else self._found

    def first_token(self, num_open: int, waited_s: float) -> None:
        """A request got its first token `waited_s` after it was sent, with `num_open` unfinished responses in total."""
        if num_open >= self._found and waited_s < QUEUE_S:
            self._found = min(2 * self._found, UNTOLD_AT_MOST)
