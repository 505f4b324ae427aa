"""Clients that are broken, late, greedy or ill-meant: the gateway answers them clearly, and serves the others on."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from tests.support.gateway_rig import GatewayRig, Rollout

MESSAGES = [{"role": "user", "content": "?"}]
BODY = {"model": "m", "messages": MESSAGES}


@pytest.fixture
def rig(rigs: Callable[..., GatewayRig]) -> GatewayRig:
    return rigs(lambda context, seed: "yes", max_turns=5000)


def post(rollout: Rollout, content: bytes | None = None, **options: Any) -> httpx.Response:
    """Sends a body as it is; by default a good one."""
    content = json.dumps(BODY).encode() if content is None else content
    return httpx.post(f"{rollout.access.base_url}/chat/completions", content=content, timeout=30, **options)


def raw(rig: GatewayRig) -> socket.socket:
    parts = urlsplit(rig.gateway.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def head(rollout: Rollout, *lines: str) -> bytes:
    path = urlsplit(rollout.access.base_url).path
    return "\r\n".join([f"POST {path}/chat/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": "hi"}',
        b'{"messages": [1]}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "wizard", "content": "?"}]}',
        b'{"messages": [{"role": ["user"], "content": "?"}]}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}',
        b'{"messages": [{"role": "user", "content": "?"}], "stream": "yes"}',
        b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": 1e99}',
        b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": true}',
        b'{"messages": [{"role": "user", "content": "?"}], "stop": [1]}',
        b'{"messages": [{"role": "user", "content": "?"}], "tools": [{"type": "function"}]}',
        b'{"messages": [{"role": "user", "content": "?"}], "n": 0}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "?", "x": ' + b'{"x":' * 5_000 + b"1" + b"}" * 5_000 + b"}]}",
    ],
    ids=lambda content: repr(content[:60]),
)
def test_a_malformed_body_is_a_400_in_openais_form(rig: GatewayRig, content: bytes) -> None:
    rollout = rig.open()
    answer = post(rollout, content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"] and error["type"] == "invalid_request_error" and error["code"]
    assert rollout.num_turns == 0


@pytest.mark.parametrize("key", ["", "x", "a" * 64, "ä" * 64, "a" * 5000, "%00", "..%2f..", "a" * 63 + "%ff"])
def test_a_key_that_was_never_given_is_refused_before_its_body_is_read(rig: GatewayRig, key: str) -> None:
    rig.open()
    url = f"{rig.gateway.url}/r/{key}/v1/chat/completions"
    answer = httpx.post(url, content=b"x" * 100, timeout=30)
    assert answer.status_code in (401, 404) and answer.json()["error"]["code"], answer.text
    for header in ("Bearer", "Bearer x", "Basic x", f"Bearer x{key[:4000].encode().hex()}"):
        answer = httpx.post(f"{rig.gateway.url}/v1/chat/completions", headers={"Authorization": header}, content=b"")
        assert answer.status_code == 401


def test_other_routes_and_methods_have_openais_errors(rig: GatewayRig) -> None:
    rollout = rig.open()
    for method, path in (("GET", "/chat/completions"), ("POST", "/completions"), ("POST", "/embeddings")):
        answer = httpx.request(method, rollout.access.base_url + path)
        assert answer.status_code in (404, 405) and answer.json()["error"]["code"] == "no_such_route"


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_a_413(rig: GatewayRig, announced: bool) -> None:
    rollout = rig.open()
    content = b"x" * (9 * 2**20)
    answer = (
        post(rollout, content)
        if announced
        else httpx.post(f"{rollout.access.base_url}/chat/completions", content=iter([content[: 2**20]] * 9), timeout=30)
    )
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert post(rollout).status_code == 200


def test_a_compressed_body_is_not_unpacked(rig: GatewayRig) -> None:
    bomb = gzip.compress(b"x" * 50_000_000)
    assert post(rig.open(), bomb, headers={"Content-Encoding": "gzip"}).status_code == 400


def test_headers_are_bounded(rig: GatewayRig) -> None:
    rollout = rig.open()
    assert post(rollout, headers={"x-long": "a" * 20_000}).status_code == 400
    assert post(rollout, headers={f"x-{number}": "a" for number in range(500)}).status_code == 400
    assert post(rollout).status_code == 200


def test_a_client_that_sends_its_headers_forever_is_cut_off(rig: GatewayRig, monkeypatch, rigs) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.gateway.IDLE_S", 1.0)
    slow = rigs(lambda context, seed: "yes")
    rollout = slow.open()
    connection = raw(slow)
    connection.sendall(head(rollout)[:20])
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            connection.sendall(b"x")
            time.sleep(0.1)
    assert post(rollout).status_code == 200


def test_a_client_that_sends_its_body_too_slowly_gets_a_408(rig: GatewayRig, monkeypatch) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.server.BODY_TIMEOUT_S", 0.3)
    connection = raw(rig)
    connection.sendall(head(rig.open(), "Content-Length: 100") + b"{")
    assert b" 408 " in connection.recv(65536)


def test_a_client_that_does_not_take_its_answer_is_left(rigs, monkeypatch, eventually) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.server.SEND_TIMEOUT_S", 0.3)
    monkeypatch.setattr("async_rl.parts.gateway.exchanges.RETRY_GRACE_S", 1.0)
    # More than the buffers of a connection hold.
    rig = rigs(lambda context, seed: "a" * 10_000, max_response_tokens=20_000)
    rig.gateway._site._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    rollout = rig.open()
    connection = raw(rig)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({**BODY, "logprobs": True}).encode()
    connection.sendall(head(rollout, f"Content-Length: {len(body)}") + body)
    eventually(lambda: rollout.num_turns == 1)
    eventually(lambda: rollout.num_turns == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_the_middle_leaves_no_turn(rig: GatewayRig, eventually, stream, monkeypatch) -> None:
    monkeypatch.setattr("async_rl.parts.gateway.exchanges.RETRY_GRACE_S", 0.1)
    rig.policy.before_answering = lambda: asyncio.sleep(60)
    rollout = rig.open()
    connection = raw(rig)
    body = json.dumps({**BODY, "stream": stream}).encode()
    connection.sendall(head(rollout, f"Content-Length: {len(body)}") + body)
    eventually(lambda: len(rig.policy.requests) == 1)
    connection.close()
    eventually(lambda: rig.policy.num_cancelled == 1)
    rig.policy.before_answering = lambda: asyncio.sleep(0)
    assert post(rollout).status_code == 200 and rollout.end().num_turns == 1


def test_half_a_request_is_no_request(rig: GatewayRig) -> None:
    rollout = rig.open()
    for lines in (["Content-Length: 100"], ["Transfer-Encoding: chunked"]):
        connection = raw(rig)
        connection.sendall(head(rollout, *lines) + b'{"messages"')
        connection.close()
    assert post(rollout).status_code == 200 and rollout.end().num_turns == 1


def test_no_http_at_all_harms_nobody(rig: GatewayRig, caplog: pytest.LogCaptureFixture) -> None:
    rollout = rig.open()
    for content in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        connection = raw(rig)
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536)[:12] in (b"", b"HTTP/1.0 400", b"HTTP/1.1 400")
    assert post(rollout).status_code == 200
    assert not caplog.records, "whoever reaches the port could fill the trainer's log"


def test_two_requests_at_once_are_two_turns_unless_one_is_a_retry(rig: GatewayRig) -> None:
    rig.policy.before_answering = lambda: asyncio.sleep(0.5)
    for headers, num_turns in (({}, 2), ({"x-stainless-retry-count": "1"}, 1), ({"Idempotency-Key": "k"}, 1)):
        rollout = rig.open()
        first = {"Idempotency-Key": "k"} if "Idempotency-Key" in headers else {}
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(post, rollout, headers=first)
            time.sleep(0.2)
            other = threads.submit(post, rollout, headers=headers)
        assert (one.result().status_code, other.result().status_code) == (200, 200)
        assert (one.result().text == other.result().text) == (num_turns == 1)
        assert rollout.end().num_turns == num_turns


def test_late_clients_get_a_410(rig: GatewayRig) -> None:
    rollout = rig.open()
    assert post(rollout).status_code == 200
    rollout.end()
    for _ in range(3):
        answer = post(rollout)
        assert answer.status_code == 410 and answer.json()["error"]["code"] == "rollout_ended"


def test_one_rollout_with_a_thousand_requests_at_once_leaves_room_for_others(rig: GatewayRig) -> None:
    greedy, other = rig.open(), rig.open()
    # Long enough for a slow machine to send more than may wait.
    rig.policy.before_answering = lambda: asyncio.sleep(5.0)
    statuses = at_once([greedy] * 1000 + [other])
    assert statuses[-1] == 200 and set(statuses) == {200, 429}
    assert greedy.end().num_turns == statuses[:-1].count(200) >= 64


@pytest.mark.computes
def test_a_thousand_rollouts_at_once_are_all_served(rig: GatewayRig) -> None:
    rollouts = [rig.open(seed) for seed in range(1000)]
    rig.policy.before_answering = lambda: asyncio.sleep(0.3)
    assert at_once(rollouts) == [200] * 1000
    assert [rollout.end().num_turns for rollout in rollouts] == [1] * 1000


def at_once(rollouts: list[Rollout]) -> list[int]:
    """Sends one request to each, all at the same time; returns the statuses."""

    async def send(session: aiohttp.ClientSession, rollout: Rollout) -> int:
        async with session.post(f"{rollout.access.base_url}/chat/completions", json=BODY) as answer:
            await answer.read()
            return answer.status

    async def send_all() -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return list(await asyncio.gather(*(send(session, rollout) for rollout in rollouts)))

    return asyncio.run(send_all())


def test_a_gateway_that_is_open_to_the_network_says_so(rigs, caplog) -> None:
    rigs(lambda context, seed: "yes", gateway_host="0.0.0.0")
    assert any("open to the network" in record.getMessage() for record in caplog.records)
