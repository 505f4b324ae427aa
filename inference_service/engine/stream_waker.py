"""Wakes the requests that stream, in intervals: the generation thread notifies, the event loop wakes them.

Waking each stream for each token would cost more than generating the token. So everything that happens within
`INTERVAL_S` is sent at once, for all streams, which also combines the deltas of concurrent responses into one chunk.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from inference_service.engine.sequences import Request, Sequence

INTERVAL_S: Final = 0.025
"""Long compared with a step of a small model, short compared with any client's waiting time."""


class StreamWaker:
    """`requests` is the engine's own collection, read in the event loop; `ring` may be called by any thread."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def note_step(self, sampled: list[Sequence]) -> None:
        """Called with the sequences that received a token in this step."""
        if not self._rung and any(sequence.has_delta for sequence in sampled):
            self.ring()

    def ring(self) -> None:
        if self._rung:
            return
        assert self._loop is not None, "the engine was not started"
        self._rung = True
        self._loop.call_soon_threadsafe(self._loop.call_later, INTERVAL_S, self._wake)

    def _wake(self) -> None:
        # Reset first: samples added from here on ring again.
        self._rung = False
        for request in self._requests:
            request.wake_if_news()
