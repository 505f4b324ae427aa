"""Adds the identity of the process and its capacity to every response, so that a trainer notices a restarted process.

It wraps the embedded engine's application, and vLLM's own through its `--middleware` option; imports neither.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from async_rl.shared.protocol.routes import BOOT_ID_HEADER, MAX_CONCURRENCY_HEADER

if TYPE_CHECKING:
    # Not at run time: the program imports this module before it checks whether its extra is installed.
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BOOT_ID_VARIABLE: Final = "ASYNC_RL_BOOT_ID"
MAX_CONCURRENCY_VARIABLE: Final = "ASYNC_RL_MAX_CONCURRENCY"
"""How the launcher passes them to vLLM's server, whose processes must all report the same."""


def new_boot_id() -> str:
    """A new id for a process that has just started."""
    return uuid.uuid4().hex


def identity_headers(boot_id: str, max_concurrency: int | None) -> dict[str, str]:
    """The headers of every response."""
    reported = {} if max_concurrency is None else {MAX_CONCURRENCY_HEADER: str(max_concurrency)}
    return {BOOT_ID_HEADER: boot_id} | reported


class Identity:
    """Adds headers to every response of `app`; if outermost, also to the responses of other middlewares."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str]) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class IdentityFromEnvironment(Identity):
    """For vLLM, which constructs middlewares with the application as the only argument."""

    def __init__(self, app: ASGIApp) -> None:
        reported = os.environ.get(MAX_CONCURRENCY_VARIABLE, "")
        super().__init__(
            app, identity_headers(os.environ[BOOT_ID_VARIABLE], int(reported) if reported.isdecimal() else None)
        )
