"""Requires the bearer token on all routes of vLLM's server, by its `--middleware` option. Imported by vLLM only."""

import os

from starlette.types import ASGIApp, Receive, Scope, Send

from async_rl.shared.net.http_guard import BearerToken
from async_rl.shared.protocol.routes import OPEN_PATHS
from inference_service.options import TOKEN_VARIABLE


class TokenGuard(BearerToken):
    """vLLM constructs it with the application only, so the token comes from the environment.

    Websockets, which no trainer uses, are refused, because the token is checked only for HTTP requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, os.environ[TOKEN_VARIABLE], OPEN_PATHS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        await super().__call__(scope, receive, send)
