"""Several control calls in one: what each is answered, what ends them, and what may not be among them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from async_rl.shared.protocol.routes import BOOT_ID_HEADER, SEQUENCE, TERM_HEADER
from inference_service.sequence import Sequence

pytestmark = pytest.mark.distributed

VERSION = {"method": "GET", "path": "/weight_info"}
FINGERPRINT = {"path": "/collective_rpc", "body": json.dumps({"method": "weight_fingerprint"})}
RESUME = {"path": "/resume"}
FINISH = {"path": "/finish_weight_update", "body": "{}"}


@pytest.fixture(scope="module")
def server(launch_instance: Callable[..., Any], tiny_model: Callable[..., Path]) -> Any:
    return launch_instance(tiny_model("qwen3"))


def ask(server: Any, *calls: dict[str, Any], headers: dict[str, str] | None = None) -> list[tuple[int, Any]]:
    """Status and body of each answer."""
    answer: httpx.Response = server.client.post(SEQUENCE, json={"calls": calls}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers[BOOT_ID_HEADER] == server.client.get("/health").headers[BOOT_ID_HEADER]
    return [(each["status"], json.loads(each["body"])) for each in answer.json()["answers"]]


def test_each_call_is_answered_as_it_is_alone(server: Any) -> None:
    asleep = {"method": "GET", "path": "/is_sleeping", "expected": {"is_sleeping": False}}
    pause = {"path": "/pause?mode=wait&clear_cache=true"}
    assert ask(server, asleep, VERSION, FINGERPRINT, pause, RESUME) == [
        (200, {"is_sleeping": False}),
        (200, server.client.get("/weight_info").json()),
        (200, server.post("/collective_rpc", {"method": "weight_fingerprint"})),
        (200, {"status": "paused"}),
        (200, {"status": "resumed"}),
    ]


@pytest.mark.parametrize(
    ("first", "num_answers"),
    [
        ({**VERSION, "expected": {"weight_version": "default"}}, 2),
        ({**VERSION, "expected": {"weight_version": "v1"}}, 1),
        ({**VERSION, "expected": {"weight_version": False}}, 1),
        ({**VERSION, "expected": {"nothing": "v1"}}, 1),
        ({**FINGERPRINT, "expected": {"results": "f"}}, 1),
        (FINISH, 1),
        ({**FINISH, "may_be_refused": True}, 2),
        ({"path": "/start_weight_update", "method": "GET"}, 1),
    ],
)
def test_what_is_refused_or_not_as_expected_ends_it_before_the_next(
    server: Any, first: dict[str, Any], num_answers: int
) -> None:
    server.post("/resume")
    answers = ask(server, first, {"path": "/pause"})
    assert len(answers) == num_answers
    assert server.client.get("/is_paused").json() == {"is_paused": num_answers == 2}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "body: Invalid JSON"),
        (b"[]", "body: "),
        (b'{"calls": []}', "calls: "),
        (json.dumps({"calls": [VERSION] * 17}).encode(), "calls: "),
        (json.dumps({"calls": [{"path": "/pause", "bdy": ""}]}).encode(), "calls.0.bdy: "),
        (json.dumps({"calls": [{"path": "/pause", "method": "DELETE"}]}).encode(), "calls.0.method: "),
        (json.dumps({"calls": [{"path": SEQUENCE}]}).encode(), f"a call of the sequence is of '{SEQUENCE}': expected"),
        (b'{"calls": [{"path": "/pause"}, {"path": "/v1/completions"}]}', "is of '/v1/completions': expected one of"),
        (b'{"calls": [{"path": "/pause"}, {"path": "http://a/pause"}]}', "is of 'http://a/pause': expected one of"),
        (b'{"calls": [{"path": "/pause", "body": "\\ud800"}]}', "body: Invalid JSON"),
    ],
)
def test_what_is_none_is_refused_whole(server: Any, body: bytes, words: str) -> None:
    server.post("/resume")
    answer = server.client.post(SEQUENCE, content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert server.client.get("/is_paused").json() == {"is_paused": False}


def test_a_call_in_it_is_refused_what_it_would_be_alone(server: Any) -> None:
    run = {TERM_HEADER: "run-s:2"}
    assert ask(server, RESUME, headers=run)[0][0] == 200
    (status, body), *rest = ask(server, RESUME, VERSION, headers={TERM_HEADER: "run-s:1"})
    assert (status, body["error"]["param"], rest) == (409, "term", [])
    alone = server.client.post("/start_weight_update", content=b"{").status_code
    assert ask(server, {"path": "/start_weight_update", "body": "{"})[0][0] == alone


def test_a_fault_that_no_handler_takes_is_the_answer_of_its_call_alone() -> None:
    """As vLLM's of a worker: an update that was left open refuses the start, and the next call continues it."""
    app = FastAPI()

    @app.post("/start_weight_update")
    async def start() -> None:
        raise RuntimeError("an update is active")

    @app.post("/update_weights")
    async def update() -> str:
        return "received"

    app.add_middleware(Sequence)
    calls = [{"path": "/start_weight_update", "may_be_refused": True}, {"path": "/update_weights"}]
    with TestClient(app, raise_server_exceptions=False) as client:
        first, second = client.post(SEQUENCE, json={"calls": calls}).json()["answers"]
        assert client.post(SEQUENCE, json={"calls": [{"path": "/start_weight_update"}, calls[1]]}).json() == {
            "answers": [first]
        }
    assert first["status"] == 500 and json.loads(first["body"])["error"]["message"] == "an update is active"
    assert second == {"status": 200, "body": '"received"'}


def test_without_the_token_there_is_none(launch_instance: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    token = {"Authorization": "Bearer s3cret"}
    guarded = launch_instance(tiny_model("qwen3"), env={"ASYNC_RL_TOKEN": "s3cret"}, headers=token)
    assert httpx.post(guarded.url + SEQUENCE, json={"calls": [RESUME]}).status_code == 401
    assert ask(guarded, RESUME) == [(200, {"status": "resumed"})]


@pytest.mark.parametrize("goes", [False, True])
def test_once_the_client_has_gone_nothing_more_is_done(goes: bool) -> None:
    """Nobody would learn that the instance serves."""
    done: list[str] = []
    gone = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == {"type": "http.request", "body": b"", "more_body": False}
        done.append(scope["path"])
        if goes:
            gone.set()
            assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    body = [json.dumps({"calls": [{"path": "/finish_weight_update"}, RESUME]}).encode()]
    sent: list[Message] = []

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": SEQUENCE, "headers": []}
    asyncio.run(Sequence(application)(scope, receive, send))
    assert done == (["/finish_weight_update"] if goes else ["/finish_weight_update", "/resume"])
    assert len(sent) == (0 if goes else 2)
