"""A JSON service that follows a plan, as a reward model or a judge does on its bad days; in a thread of the test."""

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from async_rl.shared.event_loop import EventLoopThread

Answer = Callable[[Any], Any]
"""Body of a request -> JSON of its answer."""


class JsonService:
    """Each request takes the next step of `plan`, and `answer` when there is none left.

    A step is a status (after a colon: its Retry-After), bytes (the body of a 200), or "close" (the connection, without
    an answer), "cut" (in the middle of one), "hang", "endless" (a body), "redirect".
    """

    def __init__(self, answer: Answer, plan: Sequence[str | int | bytes] = (), delay_s: float = 0.0) -> None:
        self._answer = answer
        self._plan = list(plan)
        self._delay_s = delay_s
        self._num_running = 0
        self.most_at_once = 0
        self.bodies: list[Any] = []
        self.paths: list[str] = []
        self.headers: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append(request.headers)
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            await asyncio.sleep(self._delay_s)
            step = self._plan.pop(0) if self._plan else None
            return web.json_response(self._answer(body)) if step is None else await self._follow(step, request)
        finally:
            self._num_running -= 1

    async def _follow(self, step: str | int | bytes, request: web.Request) -> web.StreamResponse:
        if isinstance(step, bytes):
            return web.Response(body=step)
        if isinstance(step, int) or step[0].isdigit():
            status, _, pause = str(step).partition(":")
            return web.Response(status=int(status), text="not now", headers={"Retry-After": pause} if pause else None)
        if step == "redirect":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        if step == "hang":
            await asyncio.sleep(3600)
        if step != "close":
            reply = web.StreamResponse(headers={"Content-Length": str(2**40)})
            await reply.prepare(request)
            while step == "endless" and request.transport is not None:
                await reply.write(b" " * 2**20)
            await reply.write(b'{"rewards"')
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@contextmanager
def running(service: JsonService, tls: ssl.SSLContext | None = None) -> Iterator[JsonService]:
    """Serves at `service.url` until the end of the block."""
    loop = EventLoopThread()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/{path:.*}", service.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return runner

    runner = loop.run(start())
    service.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    yield service
    loop.run(runner.cleanup())
    loop.close()
