"""The dashboard at the fleet endpoint of a live run; for `async_rl.rollouts.fleet.app`."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from async_rl.parts.dashboard.page import (
    EVENTS_PATH,
    HEADERS,
    POLL_S,
    PREFIX,
    Answer,
    Dashboard,
    Events,
    error_answer,
)
from async_rl.parts.dashboard.run_data import RunData
from async_rl.shared.net.http_guard import is_address


def add_dashboard(app: FastAPI, run_dir: Path, has_token: bool) -> tuple[str, ...]:
    """Adds the dashboard's routes, and returns the paths that need no token; without a token it answers only where it
    is addressed by an address.
    """
    dashboard = Dashboard([RunData(run_dir)])

    def refuses(request: Request) -> bool:
        return not has_token and not is_address(request.headers.get("host", ""))

    @app.get(EVENTS_PATH)
    async def events(request: Request) -> Response:
        if refuses(request):
            return _response(_REFUSAL)
        return StreamingResponse(_events(dashboard), media_type="text/event-stream", headers=dict(HEADERS))

    @app.get(PREFIX + "{path:path}")
    async def page(request: Request) -> Response:
        if refuses(request):
            return _response(_REFUSAL)
        return _response(await asyncio.to_thread(dashboard.answer, request.url.path, dict(request.query_params)))

    return dashboard.open_paths()


_REFUSAL = error_answer(HTTPStatus.FORBIDDEN, "open the dashboard at the address of its host, not at a name")


async def _events(dashboard: Dashboard) -> AsyncIterator[bytes]:
    """Until the page is closed, or the endpoint: both cancel it."""
    events = Events(dashboard)
    while True:
        if chunk := await asyncio.to_thread(events.next):
            yield chunk
        await asyncio.sleep(POLL_S)


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), answer.content_type)
