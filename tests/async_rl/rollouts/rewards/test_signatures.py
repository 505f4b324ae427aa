"""Rewards written for TRL and for verl, unchanged: told from async-rl's own form, called as there, in the worker."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.reward import require_reward
from async_rl.checks.preflight.user_file import require_function, signature_of
from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.method.types import Prompt, Scores
from async_rl.rollouts.rewards import make_reward
from async_rl.rollouts.rewards.signatures import adapted, form_of, lacking
from async_rl.shared.event_loop import EventLoopThread
from tests.support.groups import text_responses

SIGNATURES = {
    "own": (
        *("(prompt, responses, row)", "(prompt, completions, row)", "(p, r, row, extra=None)", "(*everything)"),
        "(prompt, responses, row, /)",
    ),
    "TRL's": (
        *("(completions, **kwargs)", "(prompts, completions, **kwargs)", "(completions, answer, **kwargs)"),
        *("(prompts, completions, completion_ids, **kwargs)", "(completions, ground_truth, *, bonus=1, **kwargs)"),
        *("(completions)", "(completions, answer)", "(prompts, completions, answer, level)"),
    ),
    "verl's": (
        *("(data_source, solution_str, ground_truth, extra_info=None)", "(solution_str, ground_truth)"),
        "(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
    ),
    "none": ("()", "(responses)", "(prompt, responses)", "(a, b, c, d)", "(prompt, responses, *, row)", "(**kwargs)"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("form", "parameters"), [(form, parameters) for form, those in SIGNATURES.items() for parameters in those]
)
def test_the_form_of_a_function_follows_from_its_parameters_in_its_text_as_loaded(
    form: str, parameters: str, is_async: bool, tmp_path: Path
) -> None:
    text = f"{'async ' * is_async}def score{parameters}: ...\n"
    (tmp_path / "reward.py").write_text(text)
    name = f"python:{tmp_path / 'reward.py'}:score"
    scope: dict[str, Any] = {}
    exec(text, scope)
    definition = require_function("reward.name", name)
    assert definition is not None
    for signature in (inspect.signature(scope["score"]), signature_of(definition)):
        if form == "none":
            with pytest.raises(
                ValueError, match=r"it takes \(.*but a reward is called with \(prompt, responses, row\)"
            ):
                form_of(signature)
        else:
            assert form_of(signature) == form
    if form == "none":
        with pytest.raises(ConfigError, match=r"line 1: it takes .*; write it in one of these forms"):
            require_reward(RewardSection(name=name))
    else:
        require_reward(RewardSection(name=name))


ROW = {"prompt": "1 + 1 = ", "answer": "2", "level": 3}
MESSAGES = {**ROW, "prompt": [{"role": "user", "content": "1 + 1 = "}]}
OF_VERL = {
    "prompt": MESSAGES["prompt"],
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
    "answer": "2",
}
RESPONSES = text_responses("2", "3")


def score_of(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    made = adapted(function)
    given = made(Prompt("0", (1,), row), RESPONSES, row)
    return asyncio.run(given) if inspect.isawaitable(given) else given


def test_a_function_of_trl_gets_lists_with_one_entry_per_response() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: Any, **kwargs: Any) -> list[float | None]:
        seen.update(kwargs, completions=completions)
        return [1.0, None]

    assert score_of(reward, ROW) == [1.0, 0.0], "one that does not apply adds nothing"
    ids = [list(response.token_ids) for response in RESPONSES]
    assert seen == {
        "prompts": ["1 + 1 = "] * 2,
        "completions": ["2", "3"],
        "completion_ids": ids,
        "answer": ["2", "2"],
        "level": [3, 3],
    }
    score_of(reward, MESSAGES)
    assert seen["prompts"] == [MESSAGES["prompt"]] * 2
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in ("2", "3")]


def test_a_function_of_verl_gets_one_response_and_the_columns_of_its_data_sets() -> None:
    seen: list[dict[str, Any]] = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        seen.append(dict(locals()))
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}

    assert [each["score"] for each in score_of(compute_score, OF_VERL)] == [1.0, 0.0]
    shared = {"data_source": "sums", "ground_truth": "2", "extra_info": {"index": 7}}
    fields = [{name: each[name] for name in (*shared, "solution_str")} for each in seen]
    assert fields == [{**shared, "solution_str": text} for text in ("2", "3")]


def test_the_answer_is_the_ground_truth_of_other_rows() -> None:
    assert score_of(lambda solution_str, ground_truth: float(solution_str == ground_truth), ROW) == [1.0, 0.0]


@pytest.mark.parametrize("row", [ROW, OF_VERL])
def test_what_a_row_lacks_is_none(row: dict[str, Any]) -> None:
    seen: list[Any] = []
    score_of(lambda completions, solutions, **kwargs: seen.append(solutions) or [0.0, 0.0], row)
    score_of(lambda solution_str, weight: seen.append(weight) or 0.0, row)
    assert seen == [[None, None], None, None]


def test_what_no_row_gives_is_named() -> None:
    def trl(completions, prompts, completion_ids, answer, solutions, level=1, **kwargs): ...
    def verl(data_source, solution_str, ground_truth, extra_info, weight): ...
    def own(prompt, responses, row): ...

    def of(function: Any, *columns: str) -> list[str]:
        return lacking(inspect.signature(function), columns)

    assert of(trl, "prompt", "answer") == ["solutions"] and of(trl, "prompt", "answer", "solutions") == []
    assert of(verl, "prompt", "answer") == ["data_source", "weight"]
    assert of(verl, "source", "reward_model") == ["weight"]
    assert of(own, "prompt") == []


def test_what_a_function_declares_is_kept() -> None:
    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [0.0 for _ in completions]

    reward.correct_at = 0.5  # type: ignore[attr-defined]
    assert adapted(reward).correct_at == 0.5  # type: ignore[attr-defined]


FILE = """
def check(text, answer):
    if text == "broken":
        raise KeyError("no such column")
    return float(text == answer)

def own(prompt, responses, row):
    return [{"score": check(r.text, row["answer"]), "length": len(r.text), "kind": "own"} for r in responses]

def trl(prompts, completions, answer, **kwargs):
    return [check(text, each) for text, each in zip(completions, answer)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": check(solution_str, ground_truth), "length": len(solution_str), "kind": data_source}

async def own_later(prompt, responses, row):
    return own(prompt, responses, row)

async def trl_later(completions, **kwargs):
    return trl(completions=completions, **kwargs)

async def verl_later(data_source, solution_str, ground_truth, extra_info=None):
    return verl(data_source, solution_str, ground_truth)

def few(completions, **kwargs):
    return [1.0]

def texts(completions, **kwargs):
    return completions
"""
NAMES = ("own", "trl", "verl", "own_later", "trl_later", "verl_later")


@pytest.fixture
def scored(tmp_path: Path) -> Iterator[Callable[..., Scores]]:
    """`scored("trl", "2", "3")`: what that function of `FILE` gives these texts, in a worker."""
    (tmp_path / "reward.py").write_text(FILE)
    row = {"prompt": "1 + 1 = ", "answer": "2", "data_source": "sums"}
    loop = EventLoopThread()

    def score(name: str, *texts: str) -> Scores:
        reward = make_reward(RewardSection(name=f"python:{tmp_path / 'reward.py'}:{name}"))
        try:
            loop.run(reward.start())
            return loop.run(reward.score(Prompt("0", (1,), row), text_responses(*texts)))
        finally:
            loop.run(reward.close())

    yield score
    loop.close()


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_every_form_scores_in_the_worker(name: str, scored: Callable[..., Scores]) -> None:
    scores = scored(name, "2", "345")
    assert scores.rewards == (1.0, 0.0)
    assert scores.metrics == (() if "trl" in name else (("length", (1.0, 3.0)),)), "numbers beside the score"


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_an_error_begins_with_the_users_frames(name: str, scored: Callable[..., Scores]) -> None:
    with pytest.raises(RewardError, match="KeyError: 'no such column'") as failed:
        scored(name, "2", "broken")
    first = next(line for line in str(failed.value).splitlines() if line.lstrip().startswith("File "))
    assert "reward.py" in first and f"in {name}" in first, failed.value


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "words"), [("few", "it returned 1 values, expected 2"), ("texts", "it returned 'a' among its values")]
)
def test_a_wrong_result_is_said_without_frames(name: str, words: str, scored: Callable[..., Scores]) -> None:
    with pytest.raises(RewardError, match=words) as failed:
        scored(name, "a", "b")
    assert "File " not in str(failed.value)
