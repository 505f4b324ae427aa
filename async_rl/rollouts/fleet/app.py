"""The routes of the fleet endpoint over a pool: its members, and changes of them; for `server.py`."""

from http import HTTPStatus
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from async_rl.errors import ConfigError, UnknownInstance
from async_rl.rollouts.fleet.metrics import FleetMetrics
from async_rl.rollouts.fleet.orders import Orders
from async_rl.rollouts.pool.health import SILENT_LIMIT_S
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.net.http_guard import BearerToken, BodyLimit, NoForeignNames, error_response, invalid_request
from async_rl.shared.programs.parts import has_part, load_part
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.fleet import (
    AddRequest,
    FleetInfo,
    InstanceInfo,
    NameRequest,
    RegisterRequest,
    RegisterResponse,
)
from async_rl.shared.protocol.routes import OTHER_RUN, RUN_HEADER

_HEADER: Final = RUN_HEADER.lower().encode()


class RunGuard:
    """Responds 409 to requests that name another run than `run`; those that name none pass.

    A trainer that was killed leaves its address in its run's directory, and the next trainer at that port may be
    another run's: instances would join that run, and `async-rl fleet` would change it.
    """

    def __init__(self, app: ASGIApp, run: str) -> None:
        self._app = app
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meant = dict(scope["headers"]).get(_HEADER) if scope["type"] == "http" else None
        if meant is not None and meant != self._run.encode():
            message = (
                f"this is the fleet endpoint of run {self._run}, the request is for run "
                f"{meant.decode(errors='replace')}: its trainer does not listen here any more"
            )
            await error_response(message, HTTPStatus.CONFLICT, OTHER_RUN)(scope, receive, send)
            return
        await self._app(scope, receive, send)


OPEN_PATHS = (routes.HEALTH, routes.METRICS)
"""For monitoring; they need no token and change nothing."""

MAX_BODY_BYTES = 2**20
"""A request to change the fleet is far smaller."""

HEARTBEAT_S = SILENT_LIMIT_S / 3
"""Between two heartbeats of an instance: three must be lost before it counts as dead."""


def make_app(
    pool: InferencePool,
    orders: Orders,
    metrics: FleetMetrics,
    token: str | None,
    run: str | None = None,
    run_dir: Path | None = None,
) -> FastAPI:
    """The application; with a `token`, all routes but health, metrics and the dashboard's page require it.

    `run` is the run's uid; with `run_dir`, the run's directory, the application has the dashboard.
    """
    app = FastAPI(title="async-rl fleet", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_reading_routes(app, pool, metrics)
    _add_membership_routes(app, pool, orders)

    open_paths: tuple[str, ...] = OPEN_PATHS
    if run_dir is not None and has_part("dashboard"):
        open_paths += load_part("dashboard", "fleet_routes").add_dashboard(app, run_dir, token is not None)

    app.add_exception_handler(RequestValidationError, invalid_request)
    app.add_exception_handler(ConfigError, _refused)
    app.add_exception_handler(UnknownInstance, _unknown)
    app.add_exception_handler(HTTPException, _as_fastapi_says)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES)
    if run is not None:
        app.add_middleware(RunGuard, run=run)
    if token is not None:
        app.add_middleware(BearerToken, token=token, open_paths=open_paths)
    else:
        app.add_middleware(NoForeignNames)
    return app


def _add_reading_routes(app: FastAPI, pool: InferencePool, metrics: FleetMetrics) -> None:
    @app.get(routes.HEALTH)
    async def health() -> Response:
        return Response()

    @app.get(routes.METRICS)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get(routes.FLEET)
    async def fleet() -> FleetInfo:
        return _fleet_info(pool, metrics)


def _add_membership_routes(app: FastAPI, pool: InferencePool, orders: Orders) -> None:
    @app.post(routes.FLEET_REGISTER)
    async def register(body: RegisterRequest) -> RegisterResponse:
        member = orders.register(body.url, body.name, body.boot_id)
        state = None if member is None else member.state
        return RegisterResponse(state=state, leave=member is None, interval_s=HEARTBEAT_S)

    @app.post(routes.FLEET_ADD)
    async def add(body: AddRequest) -> InstanceInfo:
        return orders.add(body.url, body.name).info()

    @app.post(routes.FLEET_DRAIN)
    async def drain(body: NameRequest) -> InstanceInfo:
        return orders.drain(body.name).info()

    @app.post(routes.FLEET_REMOVE)
    async def remove(body: NameRequest) -> InstanceInfo:
        return orders.remove(body.name).info()


def _fleet_info(pool: InferencePool, metrics: FleetMetrics) -> FleetInfo:
    return FleetInfo(
        version=pool.version,
        instances=pool.infos(),
        desired_instances=metrics.desired_instances,
    )


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(str(error), HTTPStatus.BAD_REQUEST)


async def _unknown(request: Request, error: Exception) -> Response:
    return error_response(str(error), HTTPStatus.NOT_FOUND, "name")


async def _as_fastapi_says(request: Request, error: Exception) -> Response:
    """Unknown routes, methods and bodies that are not JSON: FastAPI's status in the protocol's format."""
    assert isinstance(error, HTTPException)
    return error_response(str(error.detail), HTTPStatus(error.status_code))
