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

SHARE = 4
"""Connections take this part of the process's descriptors at most; the rest are its own files and clients."""

MOST = 4096


def most_connections() -> int:
    """Of one server of this process, by its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(16, min(MOST, soft // SHARE))


class BoundedHttp(H11Protocol):
    """One connection. If there are too many, the one that waits for its peer for the longest time ends.

    That is one without a complete request: silent, half sent, or kept alive after a response.
    """

    heard_s = 0.0
    """`time.monotonic()` of its last bytes, or of its beginning."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.heard_s = time.monotonic()
        # Aborted ones are among them until the loop has told them so.
        of_server: set[Any] = self.connections
        others = [each for each in of_server if isinstance(each, BoundedHttp) and not each.transport.is_closing()]
        if len(others) > most_connections():
            waiting = [each for each in others if each.waits]
            min(waiting, key=lambda each: each.heard_s, default=self).transport.abort()
        asyncio.get_running_loop().call_later(CHECK_S, self._require_words)

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
