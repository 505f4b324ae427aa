"""The routes that generate, and the one that aborts requests; `app.py` adds them."""

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from async_rl.shared.protocol import routes, token_frames
from async_rl.shared.protocol.inference import AbortRequest
from inference_service.api import responses, stream_chunks
from inference_service.api.completion_choice import CompletionFormatter
from inference_service.api.errors import UnknownModel
from inference_service.api.event_stream import EventStream, FrameStream, unless_disconnected
from inference_service.api.requests import (
    MAX_RESPONSES,
    AbortResponse,
    CompletionRequest,
    CompletionResponse,
    ServedGenerateRequest,
)
from inference_service.api.responses import TextCodec
from inference_service.engine_interface import Engine, RequestRefused

T = TypeVar("T")


def add(app: FastAPI, engine: Engine, codec: TextCodec | None, model_name: str) -> None:
    """Adds the routes; with `codec`, the model's tokenizer, prompts may be text."""

    def check_model(name: str | None) -> None:
        if name is not None and name != model_name:
            raise UnknownModel(f"The model `{name}` does not exist.")

    @app.post(routes.GENERATE)
    async def generate(request: Request, body: ServedGenerateRequest) -> Response:
        check_model(body.model)
        request_id = f"generate-tokens-{_request_id(request, body.request_id)}"
        params = body.sampling_params
        if body.stream:
            deltas = engine.stream(request_id, body.token_ids, params)
            as_frames = params.logprobs == 0 and token_frames.MEDIA_TYPE in request.headers.get("accept", "")
            chunks = stream_chunks.generate_chunks(request_id, params, deltas, as_frames=as_frames)
            return FrameStream(chunks) if as_frames else EventStream(chunks)
        run = engine.generate(request_id, body.token_ids, params)
        choices = await unless_disconnected(request.receive, run)
        answer = responses.generate_response(request_id, model_name, len(body.token_ids), choices, params)
        return Response(answer, media_type="application/json")

    @app.post(routes.COMPLETIONS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        check_model(body.model)
        request_id = f"cmpl-{_request_id(request, body.request_id)}"
        prompts = _prompts(body, codec)
        if body.stream:
            deltas = [engine.stream(f"{request_id}-{i}", prompt, body) for i, prompt in enumerate(prompts)]
            return EventStream(stream_chunks.completion_chunks(request_id, model_name, body, prompts, codec, deltas))
        runs = [engine.generate(f"{request_id}-{i}", prompt, body) for i, prompt in enumerate(prompts)]
        results = await unless_disconnected(request.receive, _all(runs))
        answer = CompletionResponse(
            id=request_id,
            created=int(time.time()),
            model=model_name,
            choices=[
                CompletionFormatter(i * body.n + j, body, prompts[i], codec).format(choice)
                for i, run in enumerate(results)
                for j, choice in enumerate(run)
            ],
            usage=responses.usage(sum(map(len, prompts)), [choice for run in results for choice in run]),
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post(routes.ABORT_REQUESTS)
    async def abort_requests(body: AbortRequest) -> AbortResponse:
        ids = body.request_ids or None
        if ids is not None:
            # Clients know the id they sent; in the engine it has the route's prefix.
            ids = [*ids, *(f"generate-tokens-{i}" for i in ids)]
        return AbortResponse(aborted=engine.abort(ids))


def _request_id(request: Request, from_body: str | None) -> str:
    return request.headers.get("x-request-id") or from_body or uuid.uuid4().hex


def _prompts(body: CompletionRequest, codec: TextCodec | None) -> list[list[int]]:
    """The request's prompts as token ids."""
    prompt: Any = body.prompt
    batch = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(batch) * body.n > MAX_RESPONSES:
        raise RequestRefused(
            f"{len(batch)} prompts with n = {body.n} are {len(batch) * body.n} responses, expected {MAX_RESPONSES} at "
            "most: send several requests",
            "prompt",
        )
    if not isinstance(batch[0], str):
        return list(batch)
    if codec is None:
        raise RequestRefused("the model has no tokenizer: send the prompt as token ids", "prompt")
    return [codec.encode(text) for text in batch]


async def _all(runs: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the other coroutines."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
