"""The score that a reasoning-gym task gives an answer, by the task's own `score_answer`.

The answer is the text in the last `<answer>` tags of the response, else the whole response, stripped.

Some tasks of reasoning-gym 0.1.25 score an answer by Python's `eval`, or by sympy's `parse_expr`, which calls it. So
any answer to them would run with the rights of the trainer's user. There is no other way in than to replace parts of
it; `guard` can go when it reads answers without evaluating them.
"""

import json
import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from typing import Any

import reasoning_gym

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import tagged_in
from async_rl.rollouts.rewards.base import USED_SHARE, correct_at
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.time_limit import SharedTime, scores_in_time

LITERALS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules that evaluate an answer which should be lists."""

FORMULAS = (
    "countdown",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
)
"""Tasks that evaluate an answer which should be a formula."""

NAMES = frozenset(
    [
        *("Abs", "abs", "cbrt", "exp", "factorial", "ln", "log", "oo", "pi", "root", "sqrt"),
        *("acos", "acot", "asin", "atan", "atan2", "cos", "cot", "csc", "sec", "sin", "tan"),
        *("acosh", "asinh", "atanh", "cosh", "coth", "sinh", "tanh"),
    ]
)
"""That a formula may have, besides those of a letter, for variables and constants."""

TOKEN = re.compile(
    r"\s+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])|(?P<name>[A-Za-z][A-Za-z0-9]*)(?![\w.])|[-+*/^(),=!]", re.ASCII
)

UNREADABLE = "("
"""Stands for an answer that is no formula: it gets what the task gives any that cannot be read."""


def is_formula(answer: str) -> bool:
    """Whether a text consists of numbers, operators and names of mathematics: nothing else in it can be called."""
    place = 0
    while place < len(answer):
        token = TOKEN.match(answer, place)
        if token is None:
            return False
        name = token["name"]
        if name is not None and len(name) > 1 and name not in NAMES:
            return False
        place = token.end()
    return True


@cache
def guard() -> None:
    """Replaces what evaluates answers, in this process."""
    for module in LITERALS:
        vars(import_module(f"reasoning_gym.{module}"))["eval"] = literal_eval
    for task in FORMULAS:
        kind = import_module("reasoning_gym.factory").DATASETS[task][0]
        kind.score_answer = _of_formulas(kind.score_answer)


def _of_formulas(score: Callable[[Any, str, dict[str, Any]], float]) -> Callable[[Any, str, dict[str, Any]], float]:
    @wraps(score)
    def score_answer(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
        return score(dataset, answer if is_formula(answer) else UNREADABLE, entry)

    return score_answer


def make_score(config: RewardSection) -> RewardFunction:
    """The reward, with the time that a call has; called in the worker."""
    guard()

    @correct_at(1.0)
    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        """`row`: an entry of the task (question, answer, metadata), with its `task` and `task_options` if known."""
        task = row.get("task") or row.get("metadata", {}).get("source_dataset")
        if task is None:
            raise ValueError(f"the row names no task in 'task' or metadata.source_dataset (it has {sorted(row)})")
        dataset = _dataset(task, json.dumps(row.get("task_options", {}), sort_keys=True))
        time = SharedTime(USED_SHARE * config.timeout_s, len(responses))
        # An answer to a task of arithmetic may be a power with a billion digits.
        return scores_in_time(
            prompt,
            responses,
            time,
            lambda response: _score(dataset, _answer(response.text), row),
            "its answer could not be scored in time, which counts as wrong",
        )

    return score


def _score(dataset: Any, answer: str, row: Mapping[str, Any]) -> float:
    """The task's score; 0 for an answer that it cannot read, where others return that.

    Raises:
        Exception: of any type: it is the row that the task cannot read, since it does not even score the row's answer.
    """
    try:
        return float(dataset.score_answer(answer, dict(row)))
    except Exception:
        dataset.score_answer(row.get("answer"), dict(row))
        return 0.0


def _answer(text: str) -> str:
    tagged = tagged_in(text)
    return (tagged[-1] if tagged else text).strip()


@cache
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))
