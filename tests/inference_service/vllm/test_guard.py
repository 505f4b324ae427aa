"""What stands before vLLM's routes, around an application in vLLM's place."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from inference_service.vllm.guard import TokenGuard

PATHS = ("/pause", "/v1/models", "/health", "/ping", "/metrics")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenGuard]:
    monkeypatch.setenv("ASYNC_RL_TOKEN", "s3cret")
    return TokenGuard(Starlette(routes=[Route(path, lambda request: PlainTextResponse("reached")) for path in PATHS]))


@pytest.mark.parametrize(("token", "reached"), [("s3cret", set(PATHS)), ("other", {"/health", "/ping", "/metrics"})])
def test_only_health_and_metrics_are_open_to_who_lacks_the_token(
    guarded: TokenGuard, token: str, reached: set[str]
) -> None:
    async def ask() -> dict[str, int]:
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://x") as client:
            return {path: (await client.get(path, headers=headers)).status_code for path in PATHS}

    assert {path for path, status in asyncio.run(ask()).items() if status == 200} == reached


def test_websockets_are_refused(guarded: TokenGuard) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guarded({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
