"""`async-rl dashboard RUN [RUN2 ...]`: serves the page on runs, over or in progress, from their directories.

It listens on this machine only, unless `--host` says otherwise; then it asks for a token. Its server needs only what
the package itself installs. Exit codes: 0 success, 2 no such run, or no such address.
"""

import asyncio
import hmac
import os
import secrets
import socket
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from aiohttp import web

from async_rl.config.texts import without_brackets
from async_rl.errors import ConfigError
from async_rl.parts.dashboard.page import EVENTS_PATH, HEADERS, POLL_S, PREFIX, Answer, Dashboard, Events
from async_rl.parts.dashboard.run_data import open_run
from async_rl.shared.net.bounded_site import BoundedSite
from async_rl.shared.net.http_guard import is_address
from async_rl.shared.net.listener import is_open_to_network, listen, url_for_others
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text

DEFAULT_PORT = 8275
"""Not 8265, at which Ray's own dashboard listens."""

NUM_PORTS = 2**16


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


def make_parser() -> Parser:
    parser = Parser("async-rl dashboard", "Shows runs in a browser, live while they go on.", "RUN_DIR... [OPTIONS]")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run.dir of a run; several are compared")
    parser.add_argument(
        "--host", type=without_brackets, default="127.0.0.1", help="address to listen at (default: this machine only)"
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"0 takes a free one (default {DEFAULT_PORT})")
    return parser


async def serve(runs: Sequence[Path], host: str, port: int, token: str | None) -> None:
    """Serves until it is cancelled, and prints the address first.

    Raises:
        ConfigError: a directory is not that of a run, or the address or the port cannot be used.
    """
    dashboard = Dashboard([open_run(run) for run in runs])
    if not 0 <= port < NUM_PORTS:
        raise ConfigError(f"--port {port} is not a port: expected 0 to {NUM_PORTS - 1}")
    listener = listen("the dashboard", host, port, None)
    needed = (token or secrets.token_urlsafe(16)) if is_open_to_network(listener) else None
    async with DashboardServer(dashboard, listener, needed, {host}):
        fragment = f"#token={quote(needed, safe='')}" if needed else ""
        print(f"dashboard: {url_for_others(listener)}/dashboard/{fragment}", flush=True)
        if needed:
            print("it is open to the network, unencrypted; who has the token reads prompts and responses", flush=True)
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(options.runs, options.host, options.port, os.environ.get("ASYNC_RL_TOKEN")))
    except ConfigError as error:
        print(f"async-rl dashboard: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
