"""The dashboard's own HTTP server, for `async-rl dashboard`; it needs only what the package itself installs."""

import asyncio
import hmac
import socket
from collections.abc import Collection
from http import HTTPStatus
from types import TracebackType

from aiohttp import web

from async_rl.dashboard.page import EVENTS_PATH, HEADERS, POLL_S, PREFIX, Answer, Dashboard, Events
from async_rl.net.bounded_site import BoundedSite
from async_rl.net.http_guard import is_address


class DashboardServer:
    """Serves a dashboard at a listening socket; a context for its duration.

    Args:
        token: what requests for records need as `Authorization: Bearer TOKEN`; None needs none.
        hosts: further names, beside addresses and localhost, at which it may be addressed.
    """

    def __init__(
        self, dashboard: Dashboard, listener: socket.socket, token: str | None = None, hosts: Collection[str] = ()
    ) -> None:
        self._dashboard = dashboard
        self._token = token
        self._hosts = {socket.gethostname().lower(), *(host.lower() for host in hosts)}
        app = web.Application()
        app.router.add_get("/", _to_page)
        app.router.add_get(EVENTS_PATH, self._events)
        app.router.add_get(PREFIX + "{path:.*}", self._answer)
        # A page that stays open must not delay the end.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        self._site = BoundedSite(runner, listener)

    async def __aenter__(self) -> "DashboardServer":
        await self._site.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._site.stop()

    async def _answer(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        answer = await asyncio.to_thread(self._dashboard.answer, request.path, dict(request.query))
        return _response(answer)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        events = Events(self._dashboard)
        while True:
            if chunk := await asyncio.to_thread(events.next):
                try:
                    await response.write(chunk)
                except ConnectionError:
                    return response
            await asyncio.sleep(POLL_S)

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not is_address(request.host, self._hosts):
            text = f"the dashboard is not served under the name {request.host!r}: open its address"
            return web.Response(text=text, status=HTTPStatus.FORBIDDEN, headers=HEADERS)
        if self._token is not None and request.path not in Dashboard.open_paths():
            given, expected = request.headers.get("Authorization", ""), f"Bearer {self._token}"
            if not hmac.compare_digest(*(text.encode(errors="surrogateescape") for text in (given, expected))):
                text = "missing or wrong bearer token: open the address that the command printed"
                return web.Response(text=text, status=HTTPStatus.UNAUTHORIZED, headers=HEADERS)
        return None


async def _to_page(request: web.Request) -> web.StreamResponse:
    return web.Response(status=HTTPStatus.FOUND, headers={**HEADERS, "Location": PREFIX})


def _response(answer: Answer) -> web.Response:
    headers = {**answer.headers, "Content-Type": answer.content_type}
    return web.Response(body=answer.body, status=answer.status, headers=headers)
