"""Refuses requests that are for another run, by `async_rl.fleet.app`.

A trainer that was killed leaves its address in its run's directory, and the next trainer at that port may be another
run's: instances would join that run, and `async-rl fleet` would change it.
"""

from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from async_rl.net.http_guard import error_response
from async_rl.protocol.routes import OTHER_RUN, RUN_HEADER

_HEADER: Final = RUN_HEADER.lower().encode()


class RunGuard:
    """Responds 409 to requests that name another run than `run`; those that name none pass."""

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
