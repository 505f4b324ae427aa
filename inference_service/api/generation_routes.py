"""The routes that generate, and the one that aborts requests; `app.py` adds them."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from async_rl.shared.protocol import routes, token_frames
from async_rl.shared.protocol.inference import AbortRequest, SamplingParams
from inference_service.api import responses
from inference_service.api.completion_choice import CompletionFormatter
from inference_service.api.errors import UnknownModel
from inference_service.api.event_stream import Chunks, EventStream, FrameStream, unless_disconnected
from inference_service.api.requests import (
    MAX_RESPONSES,
    AbortResponse,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
    ServedGenerateRequest,
)
from inference_service.api.responses import GenerateChunks, TextCodec
from inference_service.engine_interface import Choice, Engine, RequestRefused

Deltas = AsyncGenerator[dict[int, Choice], None]
"""Deltas by the choice's index."""


async def generate_chunks(
    request_id: str, params: SamplingParams, deltas: Deltas, *, as_frames: bool = False
) -> Chunks:
    """One chunk for all choices that have deltas at the same time, as JSON or as a frame."""
    answer = GenerateChunks(request_id, params)
    chunk = answer.frame if as_frames else answer.chunk
    num_open = params.n
    async with aclosing(deltas):
        async for choices in deltas:
            num_open -= _num_ended(choices)
            yield chunk(choices), num_open == 0


async def completion_chunks(
    request_id: str,
    model: str,
    body: CompletionRequest,
    prompts: Sequence[Sequence[int]],
    codec: TextCodec | None,
    deltas: Sequence[Deltas],
) -> Chunks:
    """The same for `/v1/completions`, with one stream per prompt; choices are numbered prompt by prompt."""
    created = int(time.time())
    formatters = [CompletionFormatter(i, body, prompts[i // body.n], codec) for i in range(len(prompts) * body.n)]
    num_open = len(formatters)
    async with aclosing(_merged(deltas, body.n)) as merged:
        async for choices in merged:
            chunk = CompletionChunk(
                id=request_id,
                created=created,
                model=model,
                choices=[formatters[index].format(choice) for index, choice in choices.items()],
            )
            num_open -= _num_ended(choices)
            yield chunk.model_dump_json().encode(), num_open == 0


async def _merged(streams: Sequence[Deltas], num_children: int) -> Deltas:
    """All streams as one; child j of stream i is choice i * num_children + j."""
    arrived: asyncio.Queue[dict[int, Choice] | None] = asyncio.Queue()

    async def forward(i: int, stream: Deltas) -> None:
        async with aclosing(stream):
            async for choices in stream:
                arrived.put_nowait({i * num_children + j: choice for j, choice in choices.items()})

    tasks = [asyncio.ensure_future(forward(i, stream)) for i, stream in enumerate(streams)]
    ended = asyncio.gather(*tasks)
    ended.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (choices := await arrived.get()) is not None:
            yield choices
        ended.result()
    finally:
        for task in tasks:
            task.cancel()


def _num_ended(choices: dict[int, Choice]) -> int:
    return sum(choice.finish_reason is not None for choice in choices.values())


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
            chunks = generate_chunks(request_id, params, deltas, as_frames=as_frames)
            return FrameStream(chunks) if as_frames else EventStream(chunks)
        run = engine.generate(request_id, body.token_ids, params)
        choices = await unless_disconnected(request.receive, run)
        answer = responses.generate_response(request_id, model_name, len(body.token_ids), choices, params)
        return Response(answer, media_type="application/json")

    @app.post(routes.COMPLETIONS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        check_model(body.model)
        if body.routed_experts:
            raise RequestRefused(f"completions do not report experts: ask {routes.GENERATE}", "routed_experts")
        request_id = f"cmpl-{_request_id(request, body.request_id)}"
        prompts = _prompts(body, codec)
        if body.stream and body.echo:
            raise RequestRefused("a stream does not begin with its prompt: leave stream or echo out", "echo")
        if body.stream:
            deltas = [engine.stream(f"{request_id}-{i}", prompt, body) for i, prompt in enumerate(prompts)]
            return EventStream(completion_chunks(request_id, model_name, body, prompts, codec, deltas))
        scores = bool(body.echo) and body.logprobs is not None
        runs = [engine.generate(f"{request_id}-{i}", prompt, body, scores) for i, prompt in enumerate(prompts)]
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
