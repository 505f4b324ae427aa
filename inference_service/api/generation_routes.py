"""The routes that generate, and the one that aborts requests; `app.py` adds them."""

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request, Response

from async_rl.shared.protocol import routes, token_frames
from async_rl.shared.protocol.inference import AbortRequest, SamplingParams
from inference_service.api import responses
from inference_service.api.errors import UnknownModel
from inference_service.api.event_stream import Chunks, EventStream, FrameStream, unless_disconnected
from inference_service.api.requests import AbortResponse, ServedGenerateRequest
from inference_service.api.responses import GenerateChunks
from inference_service.engine_interface import Choice, Engine

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


def _num_ended(choices: dict[int, Choice]) -> int:
    return sum(choice.finish_reason is not None for choice in choices.values())


def add(app: FastAPI, engine: Engine, model_name: str) -> None:
    """Adds the routes."""

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

    @app.post(routes.ABORT_REQUESTS)
    async def abort_requests(body: AbortRequest) -> AbortResponse:
        ids = body.request_ids or None
        if ids is not None:
            # Clients know the id they sent; in the engine it has the route's prefix.
            ids = [*ids, *(f"generate-tokens-{i}" for i in ids)]
        return AbortResponse(aborted=engine.abort(ids))


def _request_id(request: Request, from_body: str | None) -> str:
    return request.headers.get("x-request-id") or from_body or uuid.uuid4().hex
