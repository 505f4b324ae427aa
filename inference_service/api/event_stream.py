"""A response sent as events while it is generated (`text/event-stream`); it ends when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from async_rl.errors import AsyncRLError
from async_rl.shared.protocol import token_frames
from inference_service.api import errors

T = TypeVar("T")

Chunks = AsyncGenerator[tuple[bytes, bool], None]
"""JSON texts or frames, and whether each is the last."""

END: Final = b"data: [DONE]\n\n"


class Disconnected(AsyncRLError):
    """The client disconnected before its response was ready; the error is not sent anywhere."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client closes the connection first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


class EventStream(Response):
    """Sends each JSON text of `chunks` as one event, and `[DONE]` with the one that is marked as the last.

    Every write to the socket competes with the generation thread for the interpreter, so the end is not written
    separately. A fault of the service in the middle of the stream is sent as an event with the protocol's error body;
    nothing follows it.
    """

    media_type = "text/event-stream"
    end = END

    def __init__(self, chunks: Chunks) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        # The length is not known in advance.
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_disconnected(receive, self._send_all(send))
        except Disconnected:
            # There is no client to inform.
            return

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async with aclosing(self._chunks) as chunks:
                async for data, is_last in chunks:
                    await send_body(self.framed(data) + (self.end if is_last else b""), not is_last)
        except AsyncRLError as error:
            await send_body(self.framed(errors.body_of(error).encode()), False)

    @staticmethod
    def framed(data: bytes) -> bytes:
        """One of `chunks` as it is sent."""
        return b"data: %b\n\n" % data


class FrameStream(EventStream):
    """The same with frames of arrays in place of events: `async_rl.shared.protocol.token_frames`."""

    media_type = token_frames.MEDIA_TYPE
    end = token_frames.END
    framed = staticmethod(token_frames.framed)
