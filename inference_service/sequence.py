"""Carries out a sequence of control calls (`async_rl.shared.protocol.sequence`): one round trip for all of them.

It wraps the embedded engine's application, and vLLM's own through its `--middleware` option.
"""

import asyncio
import logging
from http import HTTPStatus
from typing import Final

from fastapi import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.config.texts import said_of
from async_rl.shared.net.http_guard import error_body, error_response
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.sequence import Answer, Call, SequenceRequest, SequenceResponse, goes_on

logger = logging.getLogger("inference_service")

PATHS: Final = frozenset(
    {
        routes.IS_SLEEPING,
        routes.WAKE_UP,
        routes.PAUSE,
        routes.START_WEIGHT_UPDATE,
        routes.UPDATE_WEIGHTS,
        routes.COLLECTIVE_RPC,
        routes.FINISH_WEIGHT_UPDATE,
        routes.RESUME,
        routes.WEIGHT_INFO,
    }
)
"""What a sequence may consist of: the calls of an update."""


class Sequence:
    """Each call passes the application as if it had come alone, with the headers of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != routes.SEQUENCE or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        try:
            calls = SequenceRequest.model_validate_json(body).calls
        except ValidationError as error:
            first = error.errors()[0]
            param = ".".join(map(str, first["loc"])) or "body"
            await error_response(f"{param}: {said_of(first)}", HTTPStatus.BAD_REQUEST, param)(scope, receive, send)
            return
        if others := [call.path for call in calls if call.path.partition("?")[0] not in PATHS]:
            message = f"a call of the sequence is of {others[0]!r}: expected one of {', '.join(sorted(PATHS))}"
            await error_response(message, HTTPStatus.BAD_REQUEST, "calls")(scope, receive, send)
            return
        if (answers := await self._carry_out(calls, scope, receive)) is not None:
            answer = SequenceResponse(answers=answers).model_dump_json()
            await Response(answer, media_type="application/json")(scope, receive, send)

    async def _carry_out(self, calls: list[Call], scope: Scope, receive: Receive) -> list[Answer] | None:
        """The answers of `calls`, up to the one that ends the sequence; None if the client has gone: nobody would learn
        what the rest has done."""
        answers: list[Answer] = []
        # The body was read: what comes now is the client's end.
        end = asyncio.create_task(_wait_for_end(receive))
        try:
            for call in calls:
                answers.append(await self._call(call, scope, end))
                # Lets the end be seen, which may have come while the call went on.
                await asyncio.sleep(0)
                if end.done():
                    return None
                if not goes_on(call, answers[-1]):
                    break
        finally:
            end.cancel()
        return answers

    async def _call(self, call: Call, scope: Scope, end: asyncio.Task[None]) -> Answer:
        path, _, query = call.path.partition("?")
        body = (call.body or "").encode()
        own = (b"content-length", b"content-type")
        headers = [pair for pair in scope["headers"] if pair[0] not in own]
        headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        of_call = {"method": call.method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
        left = [body]
        status, parts = 0, []

        async def receive() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(), "more_body": False}
            await asyncio.wait([end])
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            state = dict(scope.get("state", {}))
            await self._app({**scope, **of_call, "headers": headers, "state": state}, receive, send)
        except Exception as error:
            # What handles those that no handler of the application's takes, as vLLM's for a fault of a worker, is
            # around this: it would answer the whole sequence, whose next call may be one for just that case.
            logger.exception("%s %s failed", call.method, path)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            parts = [error_body(str(error) or repr(error), status).encode()]
        return Answer(status=status, body=b"".join(parts).decode(errors="replace"))


async def _body(receive: Receive) -> bytes | None:
    """The request's; None if the client has gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
