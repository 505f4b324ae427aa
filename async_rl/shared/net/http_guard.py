"""Wrappers around the routes of our HTTP servers: the bearer token, names, the size limit, errors in one format.

The inference service and the trainer's fleet endpoint wrap their applications in them.
"""

import hmac
import ipaddress
from collections.abc import Collection
from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.config.texts import said_of
from async_rl.shared.protocol.body import ErrorInfo, ErrorResponse

MAX_MESSAGE_CHARS = 2000
"""Longer messages are cut: they may repeat a value of the request, which can be long."""

TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
}


def error_body(message: str, status: HTTPStatus, param: str | None = None) -> str:
    """The error body of the protocol: `{"error": {message, type, param, code}}`, as JSON."""
    info = ErrorInfo(
        message=_printable(message),
        type=TYPES.get(status, status.phrase),
        param=None if param is None else _printable(param),
        code=status.value,
    )
    return ErrorResponse(error=info).model_dump_json()


def error_response(message: str, status: HTTPStatus, param: str | None = None) -> Response:
    """A response with the protocol's error body."""
    return Response(error_body(message, status, param), status.value, media_type="application/json")


async def invalid_request(request: Request, error: Exception) -> Response:
    """400 that names the first invalid field; install it as an application's handler of RequestValidationError."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(f"{param or 'body'}: {said_of(first)}", HTTPStatus.BAD_REQUEST, param or None)


class BearerToken:
    """Responds 401 unless the request has `Authorization: Bearer TOKEN`, or requests one of `open_paths`."""

    def __init__(self, app: ASGIApp, token: str, open_paths: Collection[str] = ()) -> None:
        self._app = app
        # An environment variable that is not UTF-8 has surrogates in place of its invalid bytes.
        self._expected = token.encode(errors="surrogateescape")
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._allows(scope):
            message = "missing or wrong bearer token: send the header 'Authorization: Bearer TOKEN'"
            await error_response(message, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        header: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        # Constant time: the response time must not show how much of a guess was right.
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._expected)


def is_address(host: str, names: Collection[str] = ()) -> bool:
    """Whether a request's host is an address, localhost, or one of these names.

    A page of another site that lets its own name mean this machine's address could otherwise read the records.
    """
    name = host.lower() if host.endswith("]") else host.lower().rsplit(":", 1)[0]
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name in ("localhost", *names)
    return True


class NoForeignNames:
    """Responds 403 to a browser that addresses the server by a name, as 127.0.0.1 is none; for servers without a token.

    A page of another site may let its own name mean this server's address (DNS rebinding), and then send it requests.
    Browsers say what they are; programs, which use names of clusters, do not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            is_browser = "sec-fetch-mode" in headers or headers.get("user-agent", "").startswith("Mozilla/")
            if is_browser and not is_address(headers.get("host", "")):
                message = "without a token this server is open to browsers by its address only, not by a name"
                await error_response(message, HTTPStatus.FORBIDDEN)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Responds 413 to a body that is longer than `max_bytes`, by its header or as received."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            # For the app the client has disconnected; its response to that is dropped.
            return message if num_bytes <= self._max_bytes else {"type": "http.disconnect"}

        async def unless_too_long(message: Message) -> None:
            if num_bytes <= self._max_bytes:
                await send(message)

        try:
            await self._app(scope, counted, unless_too_long)
        except ClientDisconnect:
            if num_bytes <= self._max_bytes:
                raise
        if num_bytes > self._max_bytes:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body is longer than {self._max_bytes} bytes: send less per request"
        await error_response(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)(scope, receive, send)


def _printable(text: str) -> str:
    """The text as valid UTF-8: JSON escapes may contain lone surrogates, and messages repeat names from a request."""
    return text[:MAX_MESSAGE_CHARS].encode(errors="backslashreplace").decode()
