"""The routes of vLLM's RL protocol (`async_rl.shared.protocol.inference`) over any Engine."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Body, FastAPI, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST

from async_rl.shared.net.http_guard import BearerToken, BodyLimit, NoForeignNames, error_response
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.inference import FinishUpdateRequest, InitRequest, RpcRequest, RpcResponse, UpdateRequest
from async_rl.shared.weights.nccl_version import nccl_version
from inference_service.api import errors, generation_routes
from inference_service.api.metrics import Metrics
from inference_service.api.requests import ModelCard, ModelList
from inference_service.api.responses import TextCodec
from inference_service.engine_interface import Engine, EngineFault, PauseMode, RequestRefused, WakeTag
from inference_service.identity import Identity, identity_headers, new_boot_id
from inference_service.sequence import Sequence
from inference_service.term_guard import TermGuard

MAX_BODY_BYTES: Final = 32 * 2**20
"""Enough for several million token ids; a longer body is a mistake or an attack."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model as the routes report it: the name clients use, and where it was loaded from."""

    model_name: str
    model_root: str


def make_app(
    engine: Engine,
    codec: TextCodec | None,
    info: ServerInfo,
    token: str | None,
    identity: Mapping[str, str] | None = None,
) -> FastAPI:
    """The application; with a `token`, all routes but health, ping and metrics require it. `identity` are the headers
    that identify the process; by default those of a process that starts now."""
    app = FastAPI(
        title="inference_service",
        version=routes.PROTOCOL_VERSION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    metrics = Metrics(engine, info.model_name)
    _add_status_routes(app, engine, info, metrics)
    generation_routes.add(app, engine, codec, info.model_name)
    _add_pause_routes(app, engine)
    _add_weight_routes(app, engine, metrics)
    errors.install(app)
    # Inside the token's check: whoever has no token must not fence the trainer.
    app.add_middleware(TermGuard)
    app.add_middleware(Sequence)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    if token is not None:
        app.add_middleware(BearerToken, token=token, open_paths=routes.OPEN_PATHS)
    else:
        app.add_middleware(NoForeignNames)
    app.add_middleware(Identity, headers=identity or identity_headers(new_boot_id(), None))
    return app


def _add_status_routes(app: FastAPI, engine: Engine, info: ServerInfo, metrics: Metrics) -> None:
    created = int(time.time())

    @app.get(routes.HEALTH)
    @app.get("/ping")
    async def health() -> Response:
        if engine.fault is not None:
            param = routes.NEEDS_WEIGHTS if engine.needs_weights else None
            return error_response(engine.fault, HTTPStatus.SERVICE_UNAVAILABLE, param)
        return Response()

    @app.get(routes.VERSION)
    async def version() -> dict[str, str]:
        return {"version": routes.PROTOCOL_VERSION}

    @app.get(routes.MODELS)
    async def models() -> ModelList:
        card = ModelCard(
            id=info.model_name, created=created, root=info.model_root, max_model_len=engine.limits.max_model_len
        )
        return ModelList(data=[card])

    @app.get(routes.METRICS)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_pause_routes(app: FastAPI, engine: Engine) -> None:
    @app.post(routes.PAUSE)
    async def pause(mode: PauseMode = "abort", clear_cache: bool = True) -> dict[str, str]:
        await engine.pause(mode, clear_cache)
        return {"status": "paused"}

    @app.post(routes.RESUME)
    async def resume() -> dict[str, str]:
        await engine.resume()
        return {"status": "resumed"}

    @app.get(routes.IS_PAUSED)
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": engine.is_paused}

    @app.post(routes.SLEEP)
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: PauseMode = "abort") -> dict[str, str | int]:
        if mode != "abort":
            raise RequestRefused(f"mode is {mode!r}: an instance aborts what is running before it sleeps", "mode")
        await engine.sleep(level)
        return {"status": "sleeping", "level": level}

    @app.post(routes.WAKE_UP)
    async def wake_up(tags: Annotated[list[WakeTag], Query()] = []) -> dict[str, str | list[WakeTag] | None]:  # noqa: B006
        await engine.wake_up(tags)
        return {"status": "awake", "tags": tags or None}

    @app.get(routes.IS_SLEEPING)
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": engine.is_sleeping or engine.is_paused}


def _add_weight_routes(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get(routes.GET_WORLD_SIZE)
    async def get_world_size() -> dict[str, int]:
        return {"world_size": 1}

    @app.get(routes.WEIGHT_INFO)
    async def weight_info() -> dict[str, str]:
        return {"weight_version": engine.weight_version}

    @app.post(routes.INIT_WEIGHT_TRANSFER)
    async def init_weight_transfer(body: InitRequest) -> dict[str, str]:
        with metrics.weight_operation("init"):
            await engine.init_weight_transfer(body.init_info)
        return {"message": "Weight transfer initialized"}

    @app.post(routes.START_WEIGHT_UPDATE)
    async def start_weight_update() -> dict[str, str]:
        with metrics.weight_operation("start"):
            await engine.start_weight_update()
        return {"message": "Weight update started"}

    @app.post(routes.UPDATE_WEIGHTS)
    async def update_weights(body: UpdateRequest) -> dict[str, str]:
        with metrics.weight_operation("update"):
            await engine.update_weights(body.update_info)
        return {"message": "Weights updated"}

    @app.post(routes.FINISH_WEIGHT_UPDATE)
    async def finish_weight_update(body: Annotated[FinishUpdateRequest | None, Body()] = None) -> dict[str, str]:
        with metrics.weight_operation("finish"):
            await engine.finish_weight_update(None if body is None else body.weight_version)
        return {"message": "Weight update finished"}

    @app.post(routes.COLLECTIVE_RPC)
    async def collective_rpc(body: RpcRequest) -> RpcResponse:
        if body.method == routes.FINGERPRINT_METHOD:
            return RpcResponse(results=[engine.weight_fingerprint])
        if body.method == routes.NCCL_METHOD:
            return RpcResponse(results=[nccl_version()])
        if body.method == routes.BASE_METHOD:
            return RpcResponse(results=[await engine.base_digest()])
        raise EngineFault(
            f"Call to collective_rpc method failed: the engine has no method {body.method!r}, "
            f"only {routes.FINGERPRINT_METHOD!r}, {routes.NCCL_METHOD!r} and {routes.BASE_METHOD!r}"
        )
