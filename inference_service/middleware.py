"""What every request passes first: the bearer token, where one is set, and the size limit of bodies."""

import hmac
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.protocol import HEALTH, METRICS
from inference_service.api_errors import error_response

OPEN_PATHS: Final = frozenset({HEALTH, "/ping", METRICS})
"""Paths that need no token: what load balancers and monitors ask."""

MAX_BODY_BYTES: Final = 32 * 2**20
"""Room for several million token ids; a longer body is a mistake or an attack."""


class BearerToken:
    """Answers 401 unless the request carries `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allows(Headers(scope=scope)):
            message = "missing or wrong bearer token: send the header 'Authorization: Bearer TOKEN'"
            await error_response(message, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Constant time: the answer's delay must not tell how much of a guess was right.
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self._expected)


class BodyLimit:
    """Answers 413 to a body that says it is, or turns out to be, longer than MAX_BODY_BYTES."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            await self._refuse(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            # To the app the client is gone; what it answers to that goes nowhere.
            return message if num_bytes <= MAX_BODY_BYTES else {"type": "http.disconnect"}

        async def unless_too_long(message: Message) -> None:
            if num_bytes <= MAX_BODY_BYTES:
                await send(message)

        await self._app(scope, counted, unless_too_long)
        if num_bytes > MAX_BODY_BYTES:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than {MAX_BODY_BYTES} bytes: send fewer prompts per request"
        await error_response(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)(scope, receive, send)
