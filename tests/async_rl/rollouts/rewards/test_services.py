"""The rewards `http` and `judge` against real servers, and against servers on their bad days."""

import asyncio
import time
import traceback
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.method.types import Prompt
from async_rl.rollouts.rewards.base import as_rewards
from async_rl.rollouts.rewards.function import RewardTraits, load_function
from async_rl.rollouts.rewards.service import MAX_ANSWER_BYTES, ServiceFailed
from tests.support.groups import text_responses
from tests.support.json_service import JsonService, running

TIMEOUT_S = 1.0
"""Of a call that gets no answer; pauses between attempts begin at a quarter of a second at most."""


def score(name: str, row: dict[str, Any], texts: Sequence[str], **options: Any) -> list[float]:
    """The rewards of one call, as a worker makes it."""
    shared = {key: options.pop(key) for key in ("timeout_s", "max_concurrency") if key in options}
    function = load_function(RewardSection(name=name, options=options, **({"timeout_s": 20.0} | shared)))
    assert RewardTraits.of(function).is_async
    responses = text_responses(*texts)
    return as_rewards(asyncio.run(function(Prompt("row7", (3, 4), row), responses, row)), len(texts))


def lengths(body: Any) -> Any:
    return {"rewards": [len(each["text"]) for each in body["responses"]]}


def test_a_group_is_one_request_with_all_that_a_function_would_get() -> None:
    with running(JsonService(lengths)) as service:
        assert score("http", {"answer": 5, "when": Path("x")}, ["a", "bcd"], url=service.url + "/rm") == [1.0, 3.0]
    each = {"token_ids": [5, 6], "finish_reason": "stop"}
    assert service.paths == ["/rm"] and service.bodies == [
        {
            "prompt": {"id": "row7", "token_ids": [3, 4]},
            "row": {"answer": 5, "when": "x"},
            "responses": [{"text": "a", **each}, {"text": "bcd", **each}],
        }
    ]


@pytest.mark.parametrize(
    "plan", [[500], ["503:1"], [429, 502], [408], ["close"], ["cut"], ["close", 500, "cut"]], ids=str
)
def test_a_service_that_is_busy_or_away_for_a_while_is_asked_again(plan: list[str | int | bytes]) -> None:
    num_failures, begun = len(plan), time.monotonic()
    with running(JsonService(lengths, plan)) as service:
        assert score("http", {}, ["ab"], url=service.url) == [2.0]
    assert len(service.bodies) == num_failures + 1
    assert time.monotonic() - begun > (1.0 if plan == ["503:1"] else 0.1), "it waits as long as it was told"


LATE = "raise it, or lower reward.max_concurrency"

FAULTS: list[tuple[str | int | bytes, str]] = [
    (b"not JSON", "expected JSON, but it answered: 'not JSON'"),
    (b"\xff" * 1000, "expected JSON, but it answered: '\ufffd{300}\\.\\.\\.'"),
    (b"[" * 100_000, "expected JSON"),
    (b"[1.0]", r'expected \{"rewards": \[...\]\}, but it answered: \[1.0\]'),
    (b'{"rewards": [1.0]}', r'in "rewards", it returned 1 values, expected 2 finite floats'),
    (b'{"rewards": [1, 2, 3]}', r'in "rewards", it returned more, expected 2 finite floats'),
    (b'{"rewards": [NaN, 1]}', "returned nan among its values"),
    (b'{"rewards": ["1", 1]}', "returned '1' among its values"),
    (b'{"rewards": [null, 1]}', "returned None among its values"),
    (b'{"rewards": [1e31, 1]}', r"returned 1e\+31 among its values"),
    (b'{"rewards": 1}', "returned 1, expected 2"),
    (400, "status 400, expected 200: 'not now'"),
    (404, "status 404, expected 200"),
    ("redirect", "status 307, expected 200"),
    ("endless", f"it is longer than {MAX_ANSWER_BYTES} bytes"),
]


@pytest.mark.parametrize(("step", "message"), FAULTS, ids=lambda value: str(value)[:30])
def test_an_answer_that_is_no_reward_is_an_error_at_once(step: str | int | bytes, message: str) -> None:
    with running(JsonService(lengths, [step])) as service, pytest.raises(ServiceFailed, match=message) as failed:
        score("http", {}, ["a", "b"], url=service.url)
    assert service.url in str(failed.value) and len(service.bodies) == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (["hang"], rf"no answer within 90% of reward.timeout_s = 1 s: {LATE}"),
        ([500] * 99, r"status 500: 'not now'; asked \d times in 90% of"),
        (["503:60"], "asked 1 times in 90% of"),
    ],
)
def test_a_service_that_stays_away_is_given_up_in_time(plan: list[str | int | bytes], message: str) -> None:
    """Before its process would be ended, at the whole of `reward.timeout_s`."""
    with running(JsonService(lengths, plan)) as service, pytest.raises(ServiceFailed, match=message):
        score("http", {}, ["a"], url=service.url, timeout_s=TIMEOUT_S)


def test_a_port_where_nothing_listens_is_named() -> None:
    with running(JsonService(lengths)) as service:
        pass
    with pytest.raises(ServiceFailed, match=f"{service.url}: ClientConnectorError: .*; asked \\d times"):
        score("http", {}, ["a"], url=service.url, timeout_s=TIMEOUT_S)


def test_a_row_that_json_does_not_have_arrives_nevertheless() -> None:
    row = {"x": float("nan"), "many": [float("-inf"), 1.5, {"y": b"\xff"}], "when": date(2026, 1, 2), "big": 10**400}
    with running(JsonService(lengths)) as service:
        score("http", row, ["a"], url=service.url)
    (request,) = service.bodies
    expected = {"x": None, "many": [None, 1.5, {"y": "/w=="}], "when": "2026-01-02", "big": 10**400}
    assert request["row"] == expected


def said(content: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def judged(body: Any) -> Any:
    """A number for the task's last word: the longer, the better."""
    return said(f"Well.\n{len(body['messages'][0]['content'].split()[-1])}")


JUDGE = {"model": "m", "rubric": "Rate the answer to {prompt}: {response}", "max_score": 10}


def test_the_judge_is_asked_about_every_response() -> None:
    with running(JsonService(judged)) as service:
        assert score("judge", {"prompt": "2 + 3?"}, ["five", "x"], url=service.url + "/v1/", **JUDGE) == [0.4, 0.1]
    assert service.paths == ["/v1/chat/completions"] * 2
    asked = sorted(body["messages"][0]["content"] for body in service.bodies)
    assert asked == ["Rate the answer to 2 + 3?: five", "Rate the answer to 2 + 3?: x"]
    assert {(body["model"], body["temperature"]) for body in service.bodies} == {("m", 0)}


def test_no_more_requests_are_under_way_than_allowed() -> None:
    with running(JsonService(judged, delay_s=0.05)) as service:
        options = {"url": service.url, "max_concurrency": 3, **JUDGE}
        assert score("judge", {"prompt": "p"}, ["a"] * 12, **options) == [0.1] * 12
    assert service.most_at_once == 3


@pytest.mark.parametrize("content", ["I refuse", None, "11", ""])
def test_a_judge_that_gives_no_score_is_asked_three_times(content: Any) -> None:
    with running(JsonService(lambda body: said(content))) as service:
        options = {"url": service.url, **JUDGE}
        with pytest.raises(ServiceFailed, match=r"expected a number from 0 to 10 in its last line, but the judge's"):
            score("judge", {"prompt": "p"}, ["a"], **options)
        assert len(service.bodies) == 3
        assert score("judge", {"prompt": "p"}, ["a"], unreadable_reward=-1.0, **options) == [-1.0]


def test_a_judge_that_comes_to_its_senses_is_believed() -> None:
    answers = iter(["hm", "hm, 3 or 4", "8"])
    with running(JsonService(lambda body: said(next(answers)))) as service:
        assert score("judge", {"prompt": "p"}, ["a"], url=service.url, **JUDGE) == [0.8]


@pytest.mark.parametrize("answer", [{"choices": []}, {"error": "no such model"}, [], 3, None, {"choices": [{}]}])
def test_what_is_no_chat_completion_is_named(answer: Any) -> None:
    with (
        running(JsonService(lambda body: answer)) as service,
        pytest.raises(ServiceFailed, match=r"expected a chat completion with choices\[0\]"),
    ):
        score("judge", {"prompt": "p"}, ["a"], url=service.url, **JUDGE)


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("abc\n")
    monkeypatch.setenv("RM_TOKEN", "xyz")
    with running(JsonService(lengths)) as service:
        for place in (f"file:{tmp_path}/token", "env:RM_TOKEN"):
            score("http", {}, ["a"], url=service.url, token_from=place)
        score("http", {}, ["a"], url=service.url)
    assert [headers.get("Authorization") for headers in service.headers] == ["Bearer abc", "Bearer xyz", None]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("env:NO_SUCH", "there is no such variable"),
        ("file:/no/such", "which cannot be read: .*No such file"),
        ("file:/dev/null", "where there is no token"),
    ],
)
def test_a_token_that_is_not_there_is_named(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.options\.token_from is '{place}', .*{message}"):
        load_function(RewardSection(name="http", options={"url": "http://a", "token_from": place}))


@pytest.mark.parametrize(("name", "more"), [("http", {}), ("judge", {"model": "m", "rubric": "{response}"})])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_which_response_is_correct_is_an_option(name: str, more: dict[str, str], threshold: float | None) -> None:
    options = {"url": "http://a", "correct_at": threshold, **more}
    assert RewardTraits.of(load_function(RewardSection(name=name, options=options))).correct_at == threshold


SECRET = "sk-0123456789abcdef"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("http", f'{{"headers": "Bearer {SECRET}"}}'),
        ("http", f"not JSON {'.' * 270} {SECRET}"),
        ("http", f'{{"rewards": ["{SECRET}"]}}'),
        ("judge", f'{{"error": "{SECRET}"}}'),
        ("judge", f'{{"choices": [{{"message": {{"content": "{SECRET}"}}}}]}}'),
    ],
)
def test_a_service_that_repeats_the_token_does_not_bring_it_into_an_error(
    name: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    options = {"model": "m", "rubric": "{response}"} if name == "judge" else {}
    with running(JsonService(lengths, [step.encode()] * 3)) as service, pytest.raises(ServiceFailed) as failed:
        score(name, {}, ["a"], url=service.url, token_from="env:JUDGE_TOKEN", **options)
    assert service.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert SECRET[:6] not in "".join(traceback.format_exception(failed.value))


def test_a_pause_that_no_float_holds_is_not_followed() -> None:
    with running(JsonService(lengths, ["429:" + "9" * 400])) as service:
        assert score("http", {}, ["ab"], url=service.url) == [2.0]
