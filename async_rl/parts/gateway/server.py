"""The HTTP side of the gateway: routes, keys of requests, limits of bodies and times; for `gateway`."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from async_rl.parts.gateway.answer import Answer, Decode, to_json
from async_rl.parts.gateway.api_error import ApiError
from async_rl.parts.gateway.chat_request import ChatRequest, read_chat_request
from async_rl.parts.gateway.exchanges import Exchange, Exchanges, ended
from async_rl.parts.gateway.ignored_fields import IgnoredFields
from async_rl.parts.gateway.responses_answer import response_events, response_object
from async_rl.parts.gateway.responses_request import read_responses_request
from async_rl.parts.gateway.turn_request import ApiRequest, TurnRequest


def completion(answer: Answer, request: ChatRequest, decode: Decode) -> dict[str, Any]:
    """The body of a whole answer."""
    message = {**answer.message, "refusal": None}
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "finish_reason": _finish_reason(answer),
        "logprobs": _logprobs(answer, decode) if request.logprobs else None,
    }
    body = {**_head(answer, request, "chat.completion"), "choices": [choice], "usage": _usage(answer)}
    if request.return_token_ids:
        choice["token_ids"] = list(answer.token_ids)
        body["prompt_token_ids"] = list(answer.prompt_token_ids)
    return body


def completion_events(answer: Answer, request: ChatRequest, decode: Decode) -> Iterator[bytes]:
    """The server-sent events of a streamed answer: its finished turn, in OpenAI's deltas."""
    head = _head(answer, request, "chat.completion.chunk")

    def chunk(
        delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _event({**head, "choices": [choice]})

    yield chunk({"role": "assistant", "content": ""})
    if answer.message.get("reasoning_content"):
        yield chunk({"reasoning_content": answer.message["reasoning_content"]})
    if answer.message["content"] or request.logprobs:
        logprobs = _logprobs(answer, decode) if request.logprobs else None
        yield chunk({"content": answer.message["content"]}, logprobs=logprobs)
    for index, call in enumerate(answer.calls):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish_reason(answer))
    if request.includes_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(answer: Answer, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": request.model}


def _usage(answer: Answer) -> dict[str, int]:
    num_prompt, num_sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.finish_reason == "stop" and answer.calls else answer.finish_reason


def _logprobs(answer: Answer, decode: Decode) -> dict[str, Any]:
    return {"content": answer.logprob_entries(decode), "refusal": None}


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 2**20
"""A conversation of a million tokens has about 4 MB."""

BODY_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0
"""A client sends its request, and takes its answer, within these."""

RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's clients number their attempts, from 0 on."""

IDEMPOTENCY_KEY = "Idempotency-Key"

Request = TypeVar("Request", bound=ApiRequest)

FindExchanges = Callable[[str], Exchanges | None]
"""The exchanges of a key; None after its rollout has ended. Raises ApiError for a key that is none."""


@dataclass(frozen=True, slots=True)
class ApiForm(Generic[Request]):
    """One of OpenAI's APIs: how a request is read, and its answer written, whole or as server-sent events."""

    route: str
    read: Callable[[bytes], Request]
    whole: Callable[[Answer, Request, Decode], Mapping[str, Any]]
    events: Callable[[Answer, Request, Decode], Iterator[bytes]]


CHAT = ApiForm("/chat/completions", read_chat_request, completion, completion_events)
RESPONSES = ApiForm("/responses", read_responses_request, response_object, response_events)


def make_app(find_exchanges: FindExchanges, ignored: IgnoredFields, decode: Decode, model: str) -> web.Application:
    """The application; `model` is the name that it lists."""
    api = _Api(find_exchanges, ignored, decode, model)
    app = web.Application(middlewares=[api.report_errors], client_max_size=MAX_BODY_BYTES)
    for prefix in ("/v1", "/r/{key}/v1"):
        app.router.add_post(prefix + CHAT.route, partial(api.serve, CHAT))
        app.router.add_post(prefix + RESPONSES.route, partial(api.serve, RESPONSES))
        app.router.add_get(f"{prefix}/models", api.list_models)
        app.router.add_get(f"{prefix}/models/{{model:.+}}", api.show_model)
    return app


class _Api:
    def __init__(self, find_exchanges: FindExchanges, ignored: IgnoredFields, decode: Decode, model: str) -> None:
        self._find_exchanges = find_exchanges
        self._ignored = ignored
        self._decode = decode
        self._model = model

    @web.middleware
    async def report_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return error.response()
        except web.HTTPException as error:
            return ApiError(HTTPStatus(error.status), "no_such_route", f"{request.method} {request.path}").response()
        except ConnectionError:
            raise
        except Exception:
            log.exception("the gateway failed at a request; its agent gets an error")
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", "see the trainer's log").response()

    async def serve(self, api_form: ApiForm[Request], request: web.Request) -> web.StreamResponse:
        """A turn for a request of one of the APIs."""
        exchanges = self._exchanges(request)
        exchanges.enter()
        try:
            body = await _read(request)
            asked = api_form.read(body)
            self._ignored.log_new(asked.model_extra or {})
            idempotency_key = request.headers.get(IDEMPOTENCY_KEY)
            is_retry = idempotency_key is not None or request.headers.get(RETRY_COUNT, "0") != "0"
            digest = _digest(body, api_form.route, idempotency_key or "")
            async with _exchange(exchanges, asked.turn, digest, is_retry) as exchange:
                answer = await exchanges.answer(exchange)
                response, parts = self._response(api_form, asked, answer)
                await _send(request, response, parts, exchanges, exchange)
                return response
        finally:
            exchanges.leave()

    async def list_models(self, request: web.Request) -> web.Response:
        self._exchanges(request)
        return web.json_response({"object": "list", "data": [self._card(self._model)]})

    async def show_model(self, request: web.Request) -> web.Response:
        """Any name is the policy's: frameworks ask for the one that they were configured with."""
        self._exchanges(request)
        return web.json_response(self._card(request.match_info["model"]))

    def _exchanges(self, request: web.Request) -> Exchanges:
        """Before anything of the body is read: without a key nobody may take memory."""
        key = request.match_info.get("key")
        if key is None:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            key = key if scheme.lower() == "bearer" else ""
        exchanges = self._find_exchanges(key)
        if exchanges is None:
            raise ended()
        return exchanges

    def _response(
        self, api_form: ApiForm[Request], asked: Request, answer: Answer
    ) -> tuple[web.StreamResponse, Iterator[bytes]]:
        """With the parts that follow its head."""
        if asked.stream:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            return web.StreamResponse(headers=headers), api_form.events(answer, asked, self._decode)
        body = to_json(api_form.whole(answer, asked, self._decode))
        return web.Response(body=body, content_type="application/json"), iter(())

    @staticmethod
    def _card(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "async-rl"}


async def _send(
    request: web.Request, response: web.StreamResponse, parts: Iterable[bytes], exchanges: Exchanges, exchange: Exchange
) -> None:
    exchanges.sending(exchange)
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await _write(request, response, parts)
    except (TimeoutError, ConnectionError):
        exchanges.lost(exchange)
        if request.transport is not None:
            request.transport.abort()
    except BaseException:
        exchanges.lost(exchange)
        raise


async def _write(request: web.Request, response: web.StreamResponse, parts: Iterable[bytes]) -> None:
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    await response.write_eof()


@asynccontextmanager
async def _exchange(exchanges: Exchanges, turn: TurnRequest, digest: bytes, is_retry: bool) -> AsyncIterator[Exchange]:
    exchange = exchanges.join(turn, digest, is_retry)
    try:
        yield exchange
    finally:
        exchanges.part(exchange)


async def _read(request: web.Request) -> bytes:
    message = f"the body is longer than {MAX_BODY_BYTES} bytes"
    too_large = ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_too_large", message)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise too_large
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, "body_timeout", message) from error


def _digest(body: bytes, route: str, idempotency_key: str) -> bytes:
    # The text of a header may hold bytes that are no text.
    kind = f"{route} {idempotency_key}".encode(errors="surrogateescape")
    return hashlib.blake2b(body, key=hashlib.sha256(kind).digest()).digest()
