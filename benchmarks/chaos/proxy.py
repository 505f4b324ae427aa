"""A proxy between the trainer and one instance that corrupts traffic; for `benchmarks.chaos`.

The trainer knows the instance only by the proxy's address. Responses are corrupted one stream at a time, at random;
cuts, silence, slowdowns and false weight versions last until they are switched off.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web

from async_rl.rollouts.instance.answer_bytes import event_payloads
from async_rl.shared.protocol import routes
from async_rl.shared.protocol.sequence import SequenceRequest
from benchmarks.chaos.fault_log import FaultLog

HOST = "127.0.0.1"
CLOSE_TIMEOUT_S = 0.1
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
MAX_EVENT_BYTES = 2**20
SPOILED_EVENTS = 8
"""A fault occurs at one of the first so many events of a stream."""

Spoil = Literal["duplicate", "late duplicate", "lie", "truncate", "tear", "hold", "refuse", "reset"]

REFUSALS = (500, 502, 503, 429)
"""Statuses of an overloaded engine, or of a gateway in front of it; the next request passes."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How generate requests are disturbed: the share of each kind; the seconds between two events of a stream, and the
    seconds a stream is held back."""

    shares: dict[Spoil, float]
    pace_s: float
    hold_s: float


class Published:
    """The weight versions that the trainer sent to any instance, as observed by the proxies; newest last."""

    def __init__(self) -> None:
        self.versions = ["default"]

    def note(self, version: str) -> None:
        if version != self.versions[-1]:
            self.versions.append(version)


class Proxy:
    """Forwards every request at `url` to `target`, the instance's own URL."""

    def __init__(self, disturbance: Disturbance, draw: random.Random, log: FaultLog, published: Published) -> None:
        self.url = ""
        self.target = ""
        self.slowdown = 1.0
        """Factor on the pace of streams."""
        self.lies_about_version = False
        """Whether it reports that the instance holds the newest version, until the instance receives it."""
        self.num_streams = 0
        """Responses that are on their way."""
        self.on_weights: Callable[[], None] | None = None
        """Called, once, when the trainer next requests the instance to receive weights."""
        self._disturbance = disturbance
        self._draw = draw
        self._log = log
        self._published = published
        self._is_cut = False
        self._is_heard = asyncio.Event()
        self._is_heard.set()
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=CLOSE_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=NO_TIMEOUT)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        self.cut()
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def cut(self) -> None:
        """Aborts all connections, and every new one."""
        self._is_cut = True
        server = self._runner.server
        for connection in server.connections if server is not None else ():
            if connection.transport is not None:
                connection.transport.abort()

    def silence(self) -> None:
        """Accepts connections, but forwards nothing in either direction."""
        self._is_heard.clear()

    def restore(self) -> None:
        """Ends a cut, silence or slowdown."""
        self._is_cut = False
        self._is_heard.set()
        self.slowdown = 1.0

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = await request.read()
            await self._is_heard.wait()
            self._require_connection()
            self._look_at(request.path, body)
            return await self._forward(request, body)
        except (aiohttp.ClientError, OSError):
            # Like a lost host: without a response.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    def _require_connection(self) -> None:
        if self._is_cut:
            raise ConnectionResetError("the network is cut")

    def _look_at(self, path: str, body: bytes) -> None:
        """Inspects a control call, or those of a sequence, and updates the proxy's state."""
        if path == routes.SEQUENCE:
            for call in SequenceRequest.model_validate_json(body).calls:
                self._look_at(call.path, (call.body or "").encode())
        if path == routes.UPDATE_WEIGHTS and self.on_weights is not None:
            act, self.on_weights = self.on_weights, None
            act()
        if path == routes.FINISH_WEIGHT_UPDATE:
            self.lies_about_version = False
            self._published.note(json.loads(body)["weight_version"])

    async def _forward(self, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        assert self._session is not None, "the proxy is started first"
        headers = {"Content-Type": "application/json"}
        url = self.target + request.path_qs
        spoil = self._choose_spoil() if request.path == routes.GENERATE else None
        if spoil in ("refuse", "reset"):
            return self._turn_away(spoil)
        async with self._session.request(request.method, url, data=body or None, headers=headers) as answer:
            if answer.content_type == "text/event-stream":
                self.num_streams += 1
                try:
                    return await self._relay(request, answer, spoil)
                finally:
                    self.num_streams -= 1
            content = await answer.read()
            await self._is_heard.wait()
            self._require_connection()
            if request.path == routes.WEIGHT_INFO and self.lies_about_version:
                self._log.note("false weight info")
                content = json.dumps({"weight_version": self._published.versions[-1]}).encode()
            headers = _identity(answer)
            return web.Response(body=content, status=answer.status, content_type=answer.content_type, headers=headers)

    def _turn_away(self, spoil: Spoil) -> web.Response:
        """Refuses a request: with an error status, or a reset connection."""
        self._log.note(spoil)
        if spoil == "reset":
            raise ConnectionResetError("the connection was reset")
        return web.Response(status=self._draw.choice(REFUSALS), text="not now")

    async def _relay(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, spoil: Spoil | None
    ) -> web.StreamResponse:
        """Passes a stream on, event by event, and disturbs it at a random event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"} | _identity(answer))
        await response.prepare(request)
        place = self._draw.randrange(SPOILED_EVENTS)
        number, kept = 0, b""
        async for payload in event_payloads(answer.content, MAX_EVENT_BYTES, self.target):
            await asyncio.sleep(self._disturbance.pace_s * self.slowdown)
            await self._is_heard.wait()
            self._require_connection()
            event = _event(payload)
            if number == place and spoil is not None:
                if spoil in ("truncate", "tear"):
                    return await self._break_off(request, response, spoil)
                if spoil == "hold":
                    await self._hold(response, answer, event)
                    return response
                event, kept = self._spoil(spoil, payload)
            elif kept:
                event, kept = event + kept, b""
            await response.write(event)
            number += 1
        await response.write(_event(b"[DONE]"))
        return response

    def _choose_spoil(self) -> Spoil | None:
        share = self._draw.random()
        for kind, limit in self._disturbance.shares.items():
            share -= limit
            if share < 0:
                return kind
        return None

    def _spoil(self, spoil: Spoil, payload: bytes) -> tuple[bytes, bytes]:
        """The bytes to send instead of one event, and those to send after the next event."""
        event = _event(payload)
        self._log.note(spoil)
        if spoil == "duplicate":
            return event + event, b""
        if spoil == "late duplicate":
            return event, event
        other = self._draw.choice([*self._published.versions[-3:-1], "another-run-0"])
        body = json.loads(payload)
        for choice in body["choices"]:
            for span in choice.get("weight_versions") or ():
                span["version"] = other
        return _event(json.dumps(body).encode()), b""

    async def _break_off(
        self, request: web.BaseRequest, response: web.StreamResponse, spoil: Spoil
    ) -> web.StreamResponse:
        """Ends a stream too early: with a proper end, or like a lost connection."""
        self._log.note(spoil)
        if spoil == "tear" and request.transport is not None:
            request.transport.abort()
        return response

    async def _hold(self, response: web.StreamResponse, answer: aiohttp.ClientResponse, event: bytes) -> None:
        """Holds a stream back until the trainer has given up on it, then sends it; the instance continues meanwhile."""
        self._log.note("hold")
        await asyncio.sleep(self._disturbance.hold_s)
        with contextlib.suppress(ConnectionError):
            await response.write(event)
            async for payload in event_payloads(answer.content, MAX_EVENT_BYTES, self.target):
                await response.write(_event(payload))
            await response.write(_event(b"[DONE]"))


def _identity(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """The instance's identity headers."""
    names = (routes.BOOT_ID_HEADER, routes.MAX_CONCURRENCY_HEADER)
    return {name: answer.headers[name] for name in names if name in answer.headers}


def _event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"
