"""What a failed call to an instance means, by status, body and kind of fault."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from async_rl.errors import (
    ConnectionLost,
    Fenced,
    InstanceError,
    InstanceRefused,
    InstanceStalled,
    InstanceUnreachable,
    NeedsWeights,
    RequestInvalid,
)
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.dialect import DEAD_ENGINE
from async_rl.rollouts.instance.http import CONNECT_TIMEOUT_S, MAX_ERROR_CHARS, InstanceHttp, RouteMissing, within
from async_rl.shared.protocol.routes import SEQUENCE
from async_rl.shared.protocol.sequence import Answer, Call

URL = "http://a:1"


@pytest.fixture
def http() -> InstanceHttp:
    return InstanceHttp(Connections(None), URL)


def body(message: str, param: str | None = None, code: int = 500) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Error", "param": param, "code": code}}).encode()


REFUSALS = [
    (400, body("too long"), RequestInvalid, "too long"),
    (413, b"", RequestInvalid, r"\(empty body\)"),
    (422, b"[1]", RequestInvalid, r"\[1\]"),
    (401, b"", InstanceRefused, r"\(empty body\)"),
    (403, body("switched off"), RouteMissing, "switched off"),
    (404, b'{"detail":"Not Found"}', RouteMissing, "Not Found"),
    (404, body("no such model"), InstanceRefused, "no such model"),
    (500, b"<html>", InstanceRefused, "<html>"),
    (503, body("a stream broke", "weights"), NeedsWeights, "a stream broke"),
    (503, body("busy", "else"), InstanceRefused, "busy"),
    (500, body("a stream broke", "weights"), InstanceRefused, "a stream broke"),
    (500, body(f"{DEAD_ENGINE}. See above."), InstanceStalled, "the engine of instance http://a:1 has died"),
    (302, b"\xff\xfe", InstanceRefused, "\ufffd"),
]


@pytest.mark.parametrize(("status", "answer", "kind", "words"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_refusal_is_told_by_status_and_body(
    http: InstanceHttp, status: int, answer: bytes, kind: type[InstanceError], words: str
) -> None:
    with pytest.raises(InstanceError, match=words) as caught:
        http.refuse("GET", "/x", status, answer)
    assert type(caught.value) is kind
    if isinstance(caught.value, InstanceRefused):
        assert caught.value.status == status
        assert str(caught.value).startswith(f"instance {URL} refused GET /x with {status}: ")


@pytest.mark.parametrize("answer", [b"x" * 10**6, body("x" * 10**6), body(DEAD_ENGINE + "x" * 10**6)])
def test_a_long_refusal_is_cut(http: InstanceHttp, answer: bytes) -> None:
    with pytest.raises(InstanceError) as caught:
        http.refuse("GET", "/x", 500, answer)
    assert len(str(caught.value)) < MAX_ERROR_CHARS + 200


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (TimeoutError(), InstanceUnreachable, "TimeoutError"),
        (aiohttp.ServerTimeoutError("too late"), InstanceUnreachable, "too late"),
        (aiohttp.ServerDisconnectedError(), ConnectionLost, "Server disconnected"),
        (ConnectionResetError(104, "reset by peer"), ConnectionLost, "reset by peer"),
        (aiohttp.ClientPayloadError("half a body"), ConnectionLost, "half a body"),
    ],
)
def test_no_answer_in_time_is_told_from_a_broken_connection(
    http: InstanceHttp, error: Exception, kind: type[InstanceUnreachable], why: str
) -> None:
    found = http.unreachable("POST", "/x", error)
    assert type(found) is kind and str(found).startswith(f"instance {URL} did not answer POST /x: ")
    assert str(found).endswith(why)


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"n": "x"}', b"[1]", b"\xff", b'{"n": null}'])
def test_a_body_of_another_protocol_names_instance_and_route(http: InstanceHttp, answer: bytes) -> None:
    adapter = TypeAdapter(dict[str, int])
    if answer == b"{}":
        assert http.parse(adapter, answer, "/x") == {}
        return
    with pytest.raises(InstanceError, match=f"instance {URL} answered /x with a body of another protocol"):
        http.parse(adapter, answer, "/x")


@pytest.mark.parametrize("timeout_s", [0.1, CONNECT_TIMEOUT_S, 100.0])
def test_a_call_ends_within_its_timeout_and_waits_no_longer_for_a_connection(timeout_s: float) -> None:
    timeout = within(timeout_s)
    assert timeout.total == timeout_s and timeout.sock_connect == min(timeout_s, CONNECT_TIMEOUT_S)


def test_nobody_there_is_a_lost_connection() -> None:
    async def ask() -> None:
        connections = Connections(None)
        try:
            await InstanceHttp(connections, "http://127.0.0.1:9").get("/health", 5.0)
        finally:
            await connections.close()

    with pytest.raises(ConnectionLost, match=r"instance http://127\.0\.0\.1:9 did not answer GET /health"):
        asyncio.run(ask())


CALLS = [Call(path="/a", expected={"x": True}), Call(path="/b", may_be_refused=True), Call(path="/c")]
GOOD, BAD, OTHER = (200, '{"x": true}'), (500, ""), (200, '{"x": false}')


def answered_in_order(status: int, answer: bytes) -> tuple[list[tuple[int, str]], list[str]]:
    """The answers to `CALLS` of a server that answers a sequence so, and every call alone as `GOOD`; what it got."""
    got: list[str] = []

    async def sequence(request: web.Request) -> web.Response:
        got.append(request.path)
        return web.Response(status=status, body=answer)

    async def alone(request: web.Request) -> web.Response:
        got.append(request.path)
        return web.Response(text=GOOD[1])

    async def ask() -> list[Answer]:
        application = web.Application()
        application.add_routes([web.post(SEQUENCE, sequence), web.post("/{any}", alone)])
        async with TestServer(application) as server:
            connections = Connections(None)
            try:
                at = InstanceHttp(connections, str(server.make_url("")).rstrip("/"))
                return (await at.in_order(CALLS, within(5.0)))[0]
            finally:
                await connections.close()

    return [(each.status, each.body) for each in asyncio.run(ask())], got


def of_answers(*answers: tuple[int, str]) -> bytes:
    return json.dumps({"answers": [{"status": status, "body": text} for status, text in answers]}).encode()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "answers", [(GOOD, GOOD, GOOD), (GOOD, BAD, BAD), (OTHER,), (BAD,)], ids=["all", "allowed", "other", "refused"]
)
def test_a_sequence_has_answers_up_to_the_one_that_ends_it(answers: tuple[tuple[int, str], ...]) -> None:
    assert answered_in_order(200, of_answers(*answers)) == (list(answers), [SEQUENCE])


DEEP = "[" * 10**5
NOT_OF_A_SEQUENCE = [
    *(of_answers(*each) for each in ((), (GOOD,), (GOOD, GOOD), (GOOD,) * 4, (BAD, GOOD, GOOD), (OTHER, GOOD))),
    *(of_answers((200, each), GOOD, GOOD) for each in ("", DEEP, '{"x": NaN}', '{"x": null}', '{"x": [true, 1]}')),
    *(b"", b"null", b'{"answers": null}', b'{"answers": [{"status": 200, "body": "\\ud800"}]}', DEEP.encode()),
]


@pytest.mark.distributed
@pytest.mark.parametrize("answer", NOT_OF_A_SEQUENCE, ids=range(len(NOT_OF_A_SEQUENCE)))
def test_answers_that_are_none_of_the_sequence_are_refused(answer: bytes) -> None:
    with pytest.raises(InstanceError, match=r"answered (3 calls of )?/async_rl/sequence (by|with a body of another)"):
        answered_in_order(200, answer)


@pytest.mark.distributed
@pytest.mark.parametrize("status", [403, 404, 405, 501])
@pytest.mark.parametrize("answer", [b"", body("no such path")], ids=["bare", "with an error body"])
def test_where_the_route_is_missing_or_kept_back_the_calls_come_alone(status: int, answer: bytes) -> None:
    assert answered_in_order(status, answer) == ([GOOD] * 3, [SEQUENCE, "/a", "/b", "/c"])


@pytest.mark.distributed
@pytest.mark.parametrize("status", [204, 302, 400, 401, 500, 503])
def test_where_it_is_refused_they_do_not(status: int) -> None:
    with pytest.raises(InstanceRefused, match=f"refused POST {SEQUENCE} with {status}"):
        answered_in_order(status, b"")


def test_a_refused_term_is_no_fault_of_the_instance(http: InstanceHttp) -> None:
    told = body("run a is at term 2, this request is of term 1", "term", 409)
    with pytest.raises(Fenced, match=f"instance {URL} serves the trainer that has taken over this run: run a is at"):
        http.refuse("POST", "/pause", 409, told)
    with pytest.raises(InstanceRefused, match="busy"):
        http.refuse("POST", "/pause", 409, body("busy", None, 409))
