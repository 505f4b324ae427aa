"""uvicorn's HTTP protocol with bounds: `bounded_connections.py` says which, and why."""

import asyncio
import time
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from async_rl.shared.net import bounded_connections
from async_rl.shared.net.bounded_connections import make_room, require_words


class BoundedHttp(H11Protocol):
    """One connection; its server takes `ACCEPTS` of them at once."""

    waits_since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waits_since_s = time.monotonic()
        # uvicorn's set; a WebSocket would be another kind, and we serve none.
        make_room(self, cast(Any, self.connections))
        require_words(self, bounded_connections.SILENCE_S)

    def data_received(self, data: bytes) -> None:
        self.waits_since_s = time.monotonic()
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Ends a connection whose client has not waited for this answer: no client that we know does so, and a few
        bytes would ask for much work."""
        self.waits_since_s = time.monotonic()
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.close()
        super().on_response_complete()

    @property
    def waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body
