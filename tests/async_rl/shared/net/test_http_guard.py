"""The guard alone, around an application that says how many bytes it got."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from async_rl.shared.net.http_guard import BearerToken, BodyLimit, NoForeignNames, error_response

RIGHT = {"Authorization": b"Bearer s3cret"}


async def _length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


def post(
    path: str, headers: dict[str, bytes], content: bytes | AsyncIterator[bytes] = b"", token: str = "s3cret"
) -> httpx.Response:
    """One request to a guarded application that takes 100 bytes; `/open` needs no token."""
    routes = [Route(path, _length, methods=["POST"]) for path in ("/length", "/open")]
    app = BearerToken(BodyLimit(Starlette(routes=routes), 100), token, ("/open",))

    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://guarded") as client:
            return await client.post(path, headers=headers, content=content)

    return asyncio.run(call())


def test_the_right_token_opens_and_an_open_path_needs_none() -> None:
    assert post("/length", RIGHT, b"abc").text == "3"
    assert post("/length", {"Authorization": b"bearer s3cret"}).status_code == 200
    assert post("/open", {}).status_code == 200


@pytest.mark.parametrize(
    "header", [None, b"", b"s3cret", b"Bearer", b"Bearer s3cre", b"Bearer s3crets", b"Basic s3cret", b"Bearer \xff\xc3"]
)
def test_any_other_token_is_401_with_the_protocols_body(header: bytes | None) -> None:
    answer = post("/length", {} if header is None else {"Authorization": header})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == 401 and "Bearer TOKEN" in answer.json()["error"]["message"]


@pytest.mark.parametrize("token", ["źle?", "sécret", "odd \udcff byte"])
def test_a_token_may_be_of_any_letters(token: str) -> None:
    sent = b"Bearer " + token.encode(errors="surrogateescape")
    assert post("/length", {"Authorization": sent}, token=token).status_code == 200
    assert post("/length", RIGHT, token=token).status_code == 401


def test_a_longer_body_is_413_whether_it_says_so_or_not() -> None:
    async def pieces(num_bytes: int) -> AsyncIterator[bytes]:
        for _ in range(num_bytes // 10):
            yield b"0123456789"

    assert post("/length", RIGHT, b"x" * 100).text == "100"
    assert post("/length", RIGHT, b"x" * 101).status_code == 413
    assert post("/length", RIGHT, pieces(100)).text == "100"
    answer = post("/length", RIGHT, pieces(200))
    assert answer.status_code == 413 and "100 bytes" in answer.json()["error"]["message"]


def test_an_error_can_repeat_what_utf8_cannot_carry_and_is_cut_where_it_is_long() -> None:
    body = error_response("\ud800" + "x" * 100_000, HTTPStatus.BAD_REQUEST, "na\udfffme").body
    assert len(body) < 5_000 and b"\\\\ud800xxx" in body


BROWSER = {"User-Agent": "Mozilla/5.0 (X11) Firefox/140"}


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("evil.example:8000", BROWSER, 403),
        ("evil.example", {"Sec-Fetch-Mode": "cors"}, 403),
        ("trainer", BROWSER, 403),
        ("127.0.0.1:8000", BROWSER, 200),
        ("[::1]:8000", BROWSER, 200),
        ("localhost:8000", BROWSER, 200),
        ("10.0.0.7", BROWSER, 200),
        # Programs use the names of a cluster.
        ("trainer.ns.svc.cluster.local:8000", {"User-Agent": "python-httpx/1"}, 200),
        ("trainer", {"User-Agent": ""}, 200),
    ],
)
def test_without_a_token_browsers_are_let_in_by_an_address_only(
    host: str, headers: dict[str, str], status: int
) -> None:
    app = NoForeignNames(Starlette(routes=[Route("/length", _length, methods=["POST"])]))

    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.post("/length", headers={"Host": host, **headers})

    assert asyncio.run(call()).status_code == status
