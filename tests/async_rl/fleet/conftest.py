"""Pools and fleet endpoints on the test's event loop, and a way to ask an endpoint."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.sections import PoolSection
from async_rl.event_loop import EventLoopThread
from async_rl.fleet.server import FleetServer
from async_rl.pool.inference_pool import InferencePool


class Endpoint:
    """A fleet endpoint that listens."""

    def __init__(self, server: FleetServer, token: str | None) -> None:
        self.server = server
        self.url = server.url
        self.token = token

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """GET, or POST of a body (bytes as they are, all else as JSON); status and parsed answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        if self.token is not None:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, _parsed(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


@pytest.fixture
def make_pool(loop: EventLoopThread) -> Iterator[Callable[..., InferencePool]]:
    """`make_pool(url, ..., heartbeat_timeout_s=1)`; the instances need not be there: nothing watches them yet."""
    pools: list[InferencePool] = []

    def make(*urls: str, **options: Any) -> InferencePool:
        # A pool that starts without instances has to name a source of them.
        source = {} if urls else {"dns": "inference.svc:8000"}
        pool = InferencePool(PoolSection(instances=urls, **({"timeout_s": 1.0} | source | options)))
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        loop.run(pool.close())


@pytest.fixture
def serve(loop: EventLoopThread) -> Iterator[Callable[..., Endpoint]]:
    """`serve(pool, token="secret", fleet_host=...)` starts an endpoint of the pool."""
    servers: list[FleetServer] = []

    def start(
        pool: InferencePool,
        token: str | None = None,
        run_dir: Path | None = None,
        address: str = "127.0.0.1",
        **options,
    ) -> Endpoint:
        server = FleetServer(pool, PoolSection(**options), token, run_dir, address)
        servers.append(server)
        loop.run(server.start())
        return Endpoint(server, token)

    yield start
    for server in servers:
        loop.run(server.stop())


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition holds; fails where it does not within ten seconds."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline, "it did not come to hold within 10 s"
            time.sleep(0.02)

    return wait
