"""Which requests of a run's trainers an instance refuses; the same middleware wraps the embedded app and vLLM's."""

import asyncio
import json
from collections.abc import Callable

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from async_rl.shared.protocol.routes import COLLECTIVE_RPC, OPEN_PATHS, SLEEP, UPDATE_WEIGHTS, WAKE_UP
from inference_service.identity import BOOT_ID_VARIABLE, IdentityFromEnvironment
from inference_service.options import TOKEN_VARIABLE
from inference_service.sequence import Sequence
from inference_service.term_guard import MAX_RUNS, OF_ONE_RUN, TermGuard
from inference_service.vllm.guard import TokenGuard


async def accepts(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(guard: TermGuard, term: str | None, path: str = "/pause", kind: str = "http") -> tuple[int, dict[str, object]]:
    """Status and body of the response to a request with this header."""
    return asyncio.run(answer(guard, term, path, kind))


async def answer(guard: TermGuard, term: str | None, path: str, kind: str = "http") -> tuple[int, dict[str, object]]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    headers = [] if term is None else [(b"x-async-rl-term", term.encode())]
    await guard({"type": kind, "path": path, "headers": headers}, receive, send)
    return messages[0]["status"], json.loads(messages[1]["body"])


@pytest.mark.parametrize("wrapper", [TermGuard, Sequence, TokenGuard, IdentityFromEnvironment])
def test_what_wraps_an_application_lets_it_begin_and_end(
    wrapper: Callable[[ASGIApp], ASGIApp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's has something to do at both."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    monkeypatch.setenv(BOOT_ID_VARIABLE, "boot")
    seen: list[str] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def unused(*messages: Message) -> Message:
        raise AssertionError("nothing is read or sent")

    asyncio.run(wrapper(application)({"type": "lifespan", "state": {}}, unused, unused))
    assert seen == ["lifespan"]


def test_a_lower_term_of_the_same_run_is_refused_with_the_protocols_error_body() -> None:
    guard = TermGuard(accepts)
    assert ask(guard, "run-a:2")[0] == 200
    assert ask(guard, "run-a:2")[0] == 200, "the trainer's further requests, and its other leaders'"
    status, body = ask(guard, "run-a:1")
    message = "run run-a is at term 2, this request is of term 1"
    assert status == 409
    assert body == {"error": {"message": message, "type": "Conflict", "param": "term", "code": 409}}
    assert ask(guard, "run-a:3")[0] == 200
    assert ask(guard, "run-a:2")[0] == 409


def test_terms_are_numbers_and_each_run_has_its_own() -> None:
    guard = TermGuard(accepts)
    assert [ask(guard, f"run-a:{term}")[0] for term in ("9", "10", "9")] == [200, 200, 409]
    assert ask(guard, "run-b:1")[0] == 200


def test_requests_without_a_term_pass() -> None:
    guard = TermGuard(accepts)
    assert ask(guard, "run-a:2")[0] == ask(guard, None)[0] == 200


@pytest.mark.parametrize("term", ["", "run-a", "run-a:", "run-a:-1", "run-a:1.5", ":1", "a b:1", "run-a:1:2", "ü:1"])
def test_a_header_that_is_none_is_refused_and_changes_nothing(term: str) -> None:
    guard = TermGuard(accepts)
    status, body = ask(guard, term)
    assert status == 400 and "expected RUN_UID:TERM" in json.dumps(body)
    assert ask(guard, "run-a:1")[0] == 200


def test_the_memory_is_bounded_and_keeps_the_runs_that_are_heard_of() -> None:
    guard = TermGuard(accepts)
    ask(guard, "kept:5")
    for number in range(MAX_RUNS + 10):
        ask(guard, f"other-{number}:5")
        ask(guard, "kept:5")
    assert ask(guard, "kept:4")[0] == 409
    assert ask(guard, "other-0:4")[0] == 200, "forgotten"


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_whoever_has_no_token_neither_fences_a_trainer_nor_has_its_run_forgotten(path: str) -> None:
    guard = TermGuard(accepts)
    assert ask(guard, "run-a:2")[0] == 200
    for number in range(MAX_RUNS + 10):
        assert ask(guard, f"other-{number}:5", path)[0] == 200
    assert ask(guard, "run-a:999999", path)[0] == 200
    assert ask(guard, "run-a:2")[0] == 200, "not fenced"
    assert ask(guard, "run-a:1")[0] == ask(guard, "run-a:1", path)[0] == 409, "not forgotten"


def test_calls_of_the_workers_and_updates_are_refused_at_once_while_another_run_sends_weights() -> None:
    answers: list[tuple[int, dict[str, object]]] = []

    async def receives(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == UPDATE_WEIGHTS and not answers:
            # Only now, since a stream may last for minutes.
            requests = [("run-a:2", COLLECTIVE_RPC), ("run-b:7", "/pause"), *(("run-b:7", path) for path in OF_ONE_RUN)]
            answers.extend([await answer(guard, *request) for request in requests])
        await accepts(scope, receive, send)

    guard = TermGuard(receives)
    assert ask(guard, "run-a:2", UPDATE_WEIGHTS)[0] == 200
    assert [status for status, _ in answers] == [200, 200, *[409] * len(OF_ONE_RUN)]
    assert "the trainer of run run-a sends weights to this instance now, and this is run run-b" in str(answers[-1])
    assert [ask(guard, "run-b:7", path)[0] for path in OF_ONE_RUN] == [200] * len(OF_ONE_RUN), "the stream has ended"


def test_a_stream_that_broke_is_over_for_other_runs_too() -> None:
    async def breaks(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == UPDATE_WEIGHTS:
            raise ConnectionError
        await accepts(scope, receive, send)

    guard = TermGuard(breaks)
    with pytest.raises(ConnectionError):
        ask(guard, "run-a:2", UPDATE_WEIGHTS)
    assert ask(guard, "run-b:7", COLLECTIVE_RPC)[0] == 200


@pytest.mark.parametrize("other", [None, "run-b:9"])
def test_what_a_run_has_put_to_sleep_is_woken_by_that_run_alone(other: str | None) -> None:
    guard = TermGuard(accepts)
    assert ask(guard, other, WAKE_UP)[0] == 200, "nobody's"
    assert ask(guard, "run-a:1", SLEEP)[0] == 200
    assert ask(guard, None, SLEEP)[0] == 200, "it changes nothing"
    status, body = ask(guard, other, WAKE_UP)
    assert status == 409 and "run run-a has put this instance to sleep" in json.dumps(body)
    # As one that goes on from a checkpoint.
    assert ask(guard, "run-a:2", WAKE_UP)[0] == 200
    assert ask(guard, other, WAKE_UP)[0] == 200


def test_a_run_that_takes_an_instance_of_a_lost_one_puts_it_to_sleep_itself_before_it_wakes_it() -> None:
    guard = TermGuard(accepts)
    ask(guard, "run-a:1", SLEEP)
    assert ask(guard, "run-b:1", SLEEP)[0] == ask(guard, "run-b:1", WAKE_UP)[0] == 200
