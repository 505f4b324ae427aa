"""Every answer says which process made it, whatever else stands in its headers."""

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.shared.protocol.routes import BOOT_ID_HEADER, MAX_CONCURRENCY_HEADER
from inference_service.identity import (
    BOOT_ID_VARIABLE,
    MAX_CONCURRENCY_VARIABLE,
    Identity,
    IdentityFromEnvironment,
    identity_headers,
    new_boot_id,
)


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": f"{scope['type']}.response.start", "status": 200, "headers": [(b"own", b"1")]})
    await send({"type": f"{scope['type']}.response.body", "body": b"x"})


async def answers_without_headers(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 401})


def sent(app: ASGIApp, kind: str = "http") -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def call() -> None:
        await app({"type": kind}, receive, send)

    asyncio.run(call())
    return messages


def test_headers_are_added_to_those_of_the_answer() -> None:
    start, body = sent(Identity(answers, identity_headers("boot-1", 7)))
    told = {BOOT_ID_HEADER.lower().encode(): b"boot-1", MAX_CONCURRENCY_HEADER.lower().encode(): b"7"}
    assert dict(start["headers"]) == {b"own": b"1"} | told
    assert body == {"type": "http.response.body", "body": b"x"}


def test_an_answer_without_headers_gets_them_too() -> None:
    (start,) = sent(Identity(answers_without_headers, identity_headers("boot-1", None)))
    assert start["headers"] == [(BOOT_ID_HEADER.lower().encode(), b"boot-1")]


def test_what_is_no_answer_over_http_passes_as_it_is() -> None:
    start, _ = sent(Identity(answers, {"a": "b"}), "websocket")
    assert start["headers"] == [(b"own", b"1")]


def test_two_starts_have_different_names() -> None:
    assert len({new_boot_id() for _ in range(100)}) == 100


@pytest.mark.parametrize(("said", "told"), [("64", {MAX_CONCURRENCY_HEADER: "64"}), ("", {}), (None, {}), ("many", {})])
def test_the_processes_of_vllm_say_what_their_launcher_told_them(
    monkeypatch: pytest.MonkeyPatch, said: str | None, told: dict[str, Any]
) -> None:
    monkeypatch.setenv(BOOT_ID_VARIABLE, "boot-2")
    monkeypatch.delenv(MAX_CONCURRENCY_VARIABLE, raising=False)
    if said is not None:
        monkeypatch.setenv(MAX_CONCURRENCY_VARIABLE, said)
    (start,) = sent(IdentityFromEnvironment(answers_without_headers))
    expected = {BOOT_ID_HEADER: "boot-2"} | told
    assert dict(start["headers"]) == {name.lower().encode(): value.encode() for name, value in expected.items()}
