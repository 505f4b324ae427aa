"""An aiohttp site with bounds: `bounded_connections.py` says which, and why."""

import asyncio
import socket
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from async_rl.shared.net import bounded_connections
from async_rl.shared.net.bounded_connections import ACCEPTS, BACKLOG, make_room, require_words


class BoundedSite:
    """Serves an application of aiohttp at a listening socket, with bounds.

    Args:
        runner: of the application, not set up yet.
        silence_s: how long a peer may say nothing; None: `bounded_connections.SILENCE_S`.
    """

    def __init__(self, runner: web.AppRunner, listener: socket.socket, silence_s: float | None = None) -> None:
        self._runner = runner
        self._listener = listener
        self._silence_s = bounded_connections.SILENCE_S if silence_s is None else silence_s
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        runner.app.middlewares.append(_answering)

    async def start(self) -> None:
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connect, sock=self._listener, backlog=ACCEPTS)
        self._listener.listen(BACKLOG)

    async def stop(self) -> None:
        """Closes all connections; does nothing if it was not started."""
        if self._server is not None:
            self._server.close()
            await self._runner.cleanup()
            self._server = None

    def _connect(self) -> asyncio.Protocol:
        assert self._runner.server is not None, "it is set up"
        return _Connection(self._runner.server(), self._connections, self._silence_s)


class _Connection(asyncio.Protocol):
    """Passes everything on to aiohttp's own protocol."""

    transport: asyncio.Transport
    waits_since_s = 0.0

    def __init__(self, inner: asyncio.Protocol, of_server: "set[_Connection]", silence_s: float) -> None:
        self.answering: web.Request | None = None
        """Whose handler runs."""
        self._inner = inner
        self._of_server = of_server
        self._silence_s = silence_s

    @property
    def waits(self) -> bool:
        return self.answering is None or not self.answering.content.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.waits_since_s = time.monotonic()
        self._of_server.add(self)
        self._inner.connection_made(transport)
        make_room(self, self._of_server)
        require_words(self, self._silence_s)

    def data_received(self, data: bytes) -> None:
        self.waits_since_s = time.monotonic()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._of_server.discard(self)
        self._inner.connection_lost(error)


@web.middleware
async def _answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells the connection that one of its requests is being answered."""
    connection = request.transport and request.transport.get_protocol()
    if not isinstance(connection, _Connection):
        return await handler(request)
    connection.answering = request
    try:
        return await handler(request)
    finally:
        connection.answering = None
        connection.waits_since_s = time.monotonic()
