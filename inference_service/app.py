"""The routes of vLLM's RL protocol (`async_rl.protocol`) over any Engine; knows no engine internals."""

import asyncio
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from async_rl import protocol
from async_rl.errors import AsyncRLError
from async_rl.protocol import (
    AbortRequest,
    FinishUpdateRequest,
    InitRequest,
    RpcRequest,
    RpcResponse,
    UpdateRequest,
)
from inference_service import answers, api_errors
from inference_service.answers import TextCodec
from inference_service.api_errors import UnknownModel
from inference_service.bodies import (
    CompletionRequest,
    CompletionResponse,
    ModelCard,
    ModelList,
    ServedGenerateRequest,
)
from inference_service.engine import Engine, EngineFault, PauseMode, RequestRefused
from inference_service.metrics import Metrics
from inference_service.middleware import BearerToken, BodyLimit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the routes say about the model: the name clients use, and where it was loaded from."""

    model_name: str
    model_root: str


class Disconnected(AsyncRLError):
    """The client went away before its answer was ready; nobody reads the error."""


def make_app(engine: Engine, codec: TextCodec | None, info: ServerInfo, token: str | None) -> FastAPI:
    """The application; with a `token`, all routes but health, ping and metrics ask for it."""
    app = FastAPI(openapi_url=None)
    metrics = Metrics(engine, info.model_name)
    _add_status_routes(app, engine, info, metrics)
    _add_generation_routes(app, engine, codec, info)
    _add_pause_routes(app, engine)
    _add_weight_routes(app, engine, metrics)
    api_errors.install(app)
    app.add_middleware(BodyLimit)
    if token is not None:
        app.add_middleware(BearerToken, token=token)
    return app


def _add_status_routes(app: FastAPI, engine: Engine, info: ServerInfo, metrics: Metrics) -> None:
    created = int(time.time())

    @app.get(protocol.HEALTH)
    @app.get("/ping")
    async def health() -> Response:
        if engine.fault is not None:
            return api_errors.error_response(engine.fault, HTTPStatus.SERVICE_UNAVAILABLE)
        return Response()

    @app.get(protocol.VERSION)
    async def version() -> dict[str, str]:
        return {"version": protocol.PROTOCOL_VERSION}

    @app.get(protocol.MODELS)
    async def models() -> ModelList:
        card = ModelCard(
            id=info.model_name, created=created, root=info.model_root, max_model_len=engine.limits.max_model_len
        )
        return ModelList(data=[card])

    @app.get(protocol.METRICS)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_generation_routes(app: FastAPI, engine: Engine, codec: TextCodec | None, info: ServerInfo) -> None:
    def check_model(name: str | None) -> None:
        if name is not None and name != info.model_name:
            raise UnknownModel(f"The model `{name}` does not exist.")

    @app.post(protocol.GENERATE)
    async def generate(request: Request, body: ServedGenerateRequest) -> Response:
        check_model(body.model)
        request_id = f"generate-tokens-{_request_id(request, body.request_id)}"
        choices = await _unless_disconnected(request, engine.generate(request_id, body.token_ids, body.sampling_params))
        answer = answers.generate_response(
            request_id, info.model_name, len(body.token_ids), choices, body.sampling_params
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post(protocol.COMPLETIONS)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        check_model(body.model)
        request_id = f"cmpl-{_request_id(request, body.request_id)}"
        prompts = _prompts(body, codec)
        runs = [engine.generate(f"{request_id}-{i}", prompt, body) for i, prompt in enumerate(prompts)]
        results = await _unless_disconnected(request, _all(runs))
        choices = [
            answers.completion_choice(
                i * body.n + j,
                choice,
                codec,
                body.logprobs,
                prompts[i] if body.return_token_ids else None,
                bool(body.return_tokens_as_token_ids),
            )
            for i, run in enumerate(results)
            for j, choice in enumerate(run)
        ]
        answer = CompletionResponse(
            id=request_id,
            created=int(time.time()),
            model=info.model_name,
            choices=choices,
            usage=answers.usage(sum(map(len, prompts)), [choice for run in results for choice in run]),
        )
        return Response(answer.model_dump_json(), media_type="application/json")

    @app.post(protocol.ABORT_REQUESTS)
    async def abort_requests(body: AbortRequest) -> JSONResponse:
        ids = body.request_ids or None
        if ids is not None:
            # Clients know the id they sent; the engine knows it with the route's prefix.
            ids = [*ids, *(f"generate-tokens-{i}" for i in ids)]
        return JSONResponse({"status": "aborted", "aborted": engine.abort(ids)})


def _add_pause_routes(app: FastAPI, engine: Engine) -> None:
    @app.post(protocol.PAUSE)
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
        await engine.pause(mode, clear_cache)
        return {"status": "paused"}

    @app.post(protocol.RESUME)
    async def resume() -> dict[str, str]:
        await engine.resume()
        return {"status": "resumed"}

    @app.get(protocol.IS_PAUSED)
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": engine.is_paused}


def _add_weight_routes(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get(protocol.GET_WORLD_SIZE)
    async def get_world_size() -> dict[str, int]:
        return {"world_size": 1}

    @app.get(protocol.WEIGHT_INFO)
    async def weight_info() -> dict[str, str]:
        return {"weight_version": engine.weight_version}

    @app.post(protocol.INIT_WEIGHT_TRANSFER)
    async def init_weight_transfer(body: InitRequest) -> dict[str, str]:
        with metrics.weight_operation("init"):
            await engine.init_weight_transfer(body.init_info)
        return {"message": "Weight transfer initialized"}

    @app.post(protocol.START_WEIGHT_UPDATE)
    async def start_weight_update() -> dict[str, str]:
        with metrics.weight_operation("start"):
            await engine.start_weight_update()
        return {"message": "Weight update started"}

    @app.post(protocol.UPDATE_WEIGHTS)
    async def update_weights(body: UpdateRequest) -> dict[str, str]:
        with metrics.weight_operation("update"):
            await engine.update_weights(body.update_info)
        return {"message": "Weights updated"}

    @app.post(protocol.FINISH_WEIGHT_UPDATE)
    async def finish_weight_update(body: Annotated[FinishUpdateRequest | None, Body()] = None) -> dict[str, str]:
        with metrics.weight_operation("finish"):
            await engine.finish_weight_update(None if body is None else body.weight_version)
        return {"message": "Weight update finished"}

    @app.post(protocol.COLLECTIVE_RPC)
    async def collective_rpc(body: RpcRequest) -> RpcResponse:
        if body.method != protocol.FINGERPRINT_METHOD:
            raise EngineFault(
                f"Call to collective_rpc method failed: the engine has no method {body.method!r}, "
                f"only {protocol.FINGERPRINT_METHOD!r}"
            )
        return RpcResponse(results=[engine.weight_fingerprint])


def _request_id(request: Request, from_body: str | None) -> str:
    return request.headers.get("x-request-id") or from_body or uuid.uuid4().hex


def _prompts(body: CompletionRequest, codec: TextCodec | None) -> list[list[int]]:
    """The request's prompts as token ids."""
    prompt: Any = body.prompt
    batch = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if not isinstance(batch[0], str):
        return list(batch)
    if codec is None:
        raise RequestRefused("the model has no tokenizer: send the prompt as token ids", "prompt")
    return [codec.encode(text) for text in batch]


async def _all(runs: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
