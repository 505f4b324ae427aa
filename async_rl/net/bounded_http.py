"""uvicorn's HTTP protocol with bounds: strangers who connect and say nothing take no descriptors from anybody else.

Without bounds they take all descriptors of the process. asyncio then logs each failed accept with its traceback, a
million lines a minute, and whatever else the process opens fails.
"""

import asyncio
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SILENCE_S = 10.0
"""From a connection, or from the last bytes of a request that is not complete, to its end."""

CHECK_S = 1.0

GRACE_S = 1.0
"""So long a new connection may be silent: its first request is on the way, also where hundreds come at once."""

SHARE = 4
"""Connections that wait for their peer take this part of the process's descriptors, all connections three of them; the
rest are its own files and clients."""

MOST = 4096


def most_waiting() -> int:
    """Connections of one server that wait for their peer, by this process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(16, min(MOST, soft // SHARE))


class BoundedHttp(H11Protocol):
    """One connection. If too many wait for their peer, the one that does so for the longest time ends.

    These are without a complete request: silent, half sent, or kept alive after a response. One whose request is being
    answered is never ended.
    """

    heard_s = 0.0
    """`time.monotonic()` of its last bytes, or of its beginning."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard_s = time.monotonic()
        self._make_room()
        asyncio.get_running_loop().call_later(CHECK_S, self._require_words)

    def _make_room(self) -> None:
        # Aborted ones are among them until the loop has told them so.
        of_server: set[Any] = self.connections
        others = [each for each in of_server if isinstance(each, BoundedHttp) and not each.transport.is_closing()]
        waiting = [each for each in others if each.waits]
        if len(waiting) > most_waiting():
            oldest = min(waiting, key=lambda each: each.heard_s)
            if self.heard_s - oldest.heard_s > GRACE_S or len(others) > (SHARE - 1) * most_waiting():
                oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        super().data_received(data)

    @property
    def waits(self) -> bool:
        """Whether it is the peer's turn: no request is complete and unanswered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _require_words(self) -> None:
        if self.transport.is_closing():
            return
        if self.waits and time.monotonic() - self.heard_s > SILENCE_S:
            self.transport.abort()
            return
        asyncio.get_running_loop().call_later(CHECK_S, self._require_words)
