"""What engines may answer: three routes are read, and everything else is an error that names it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from async_rl.errors import BrokenAnswer, InstanceError, InstanceRefused, InstanceUnreachable
from async_rl.shared.net.free_ports import free_ports
from trainer.audit.engine import Ask, Engine

GENERATE, COMPLETIONS, SGLANG = "/inference/v1/generate", "/v1/completions", "/generate"
Answers = dict[str, Callable[[dict[str, Any]], Any]]


@contextmanager
def serving(answers: Answers) -> Iterator[str]:
    """The URL of a server that answers each path by a function of the request's body; text as it is, numbers as a
    status, other as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(answers.get(self.path), body)

        def do_GET(self) -> None:
            self._send(answers.get(self.path), {})

        def _send(self, answer: Callable[[dict[str, Any]], Any] | None, body: dict[str, Any]) -> None:
            made = "" if answer is None else answer(body)
            content = (made if isinstance(made, str) else json.dumps(made)).encode()
            self.send_response(404 if answer is None else made if isinstance(made, int) else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def generated(tokens: list[int], logprobs: list[Any], reason: str = "length") -> dict[str, Any]:
    content = [{"token_id": t, "logprob": lp} for t, lp in zip(tokens, logprobs, strict=False)]
    choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
    return {"request_id": "1", "choices": [choice]}


def completed(body: dict[str, Any]) -> dict[str, Any]:
    logprobs = {"tokens": ["token_id:5"] * body["max_tokens"], "token_logprobs": [-1.0] * body["max_tokens"]}
    return {"choices": [{"finish_reason": "length", "logprobs": logprobs}]}


def of_sglang(body: dict[str, Any]) -> dict[str, Any]:
    num = body["sampling_params"]["max_new_tokens"]
    meta = {"output_token_logprobs": [[-1.0, 5, None]] * num, "finish_reason": {"type": "length", "length": num}}
    return {"text": "", "meta_info": meta}


@pytest.mark.parametrize(
    ("answers", "route"),
    [
        ({GENERATE: lambda body: generated([5] * body["sampling_params"]["max_tokens"], [-1.0] * 99)}, GENERATE),
        ({COMPLETIONS: completed}, COMPLETIONS),
        ({COMPLETIONS: lambda _: {"choices": [{"finish_reason": "length"}]}, SGLANG: of_sglang}, SGLANG),
    ],
)
def test_three_routes_are_read(answers: Answers, route: str) -> None:
    with serving(answers) as url:
        engine = Engine(url, 10.0)
        engine.find([1, 2])
        assert engine.route == route
        (sample,) = engine.ask([Ask((1, 2), 3, 0.7)])
    assert (sample.tokens, sample.logprobs, sample.temperature) == ((5, 5, 5), (-1.0, -1.0, -1.0), 0.7)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: generated([5], [-1.0]), "expected 3, with ignore_eos"),
        (lambda _: generated([5, 5, 5, 5], [-1.0] * 4), "expected 3, with ignore_eos"),
        (lambda _: generated([5, 5, 5], [-1.0, float("nan"), -1.0]), "a log-prob of nan: expected finite"),
        (lambda _: generated([5, 5, 5], [-1.0, -float("inf"), -1.0]), "a log-prob of -inf: expected finite"),
        (lambda _: generated([5, -5, 5], [-1.0] * 3), "the token id -5: expected ids from 0"),
        (lambda _: generated([5, 5, 5], [-1.0] * 3, "abort"), "finish_reason 'abort'"),
        (lambda _: generated([5, 5, 5], [-1.0] * 2), "of different tokens"),
        (lambda _: generated([5, 5, 5], ["much"] * 3), "logprob: Input should be a valid number"),
        (lambda _: {"request_id": "1", "choices": []}, "0 choices: expected 1"),
        (lambda _: {"choices": 7}, "request_id: Field required"),
        (lambda _: "<html>hello</html>", "<html>hello</html>"),
    ],
)
def test_an_answer_that_is_no_response_is_refused_by_name(answer: Callable[[Any], Any], message: str) -> None:
    calls = [0]

    def first_right(body: dict[str, Any]) -> Any:
        calls[0] += 1
        return generated([5, 5], [-1.0, -1.0]) if calls[0] == 1 else answer(body)

    with serving({GENERATE: first_right}) as url:
        engine = Engine(url, 10.0)
        engine.find([1, 2])
        with pytest.raises(BrokenAnswer, match=message):
            engine.ask([Ask((1, 2), 3)])


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ({}, BrokenAnswer, "no route that gives token ids"),
        ({COMPLETIONS: lambda _: {"choices": [{"finish_reason": "stop"}]}}, BrokenAnswer, "without token ids or log-"),
        ({"/v1/models": lambda _: "[]"}, BrokenAnswer, "something else than its route's body"),
    ],
)
def test_a_server_without_what_an_audit_needs_is_refused(
    answers: Answers, kind: type[InstanceError], message: str
) -> None:
    with serving(answers) as url, pytest.raises(kind, match=message):
        Engine(url, 10.0).find([1, 2])


def test_an_engine_that_is_busy_is_asked_again_until_the_time_is_up() -> None:
    said = [429, 503, generated([5, 5], [-1.0, -1.0])]
    with serving({GENERATE: lambda _: said.pop(0)}) as url:
        Engine(url, 10.0).find([1, 2])
    assert said == []
    with serving({GENERATE: lambda _: 429}) as url, pytest.raises(InstanceRefused, match="answers 429"):
        Engine(url, 0.2).find([1, 2])


def test_an_engine_that_is_not_there_or_does_not_answer_is_named_in_time() -> None:
    with pytest.raises(InstanceUnreachable, match="Connection refused; check --engine"):
        Engine(f"http://127.0.0.1:{free_ports(1)[0]}", 5.0).find([1, 2])
    with (
        serving({GENERATE: lambda _: time.sleep(2) or {}}) as url,
        pytest.raises(InstanceUnreachable, match=r"within 0\.2 s"),
    ):
        Engine(url, 0.2).find([1, 2])
