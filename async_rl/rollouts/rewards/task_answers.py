"""Keeps reasoning-gym from running what a policy wrote; for `reasoning_gym`.

Some tasks of reasoning-gym 0.1.25 score an answer by Python's `eval`, or by sympy's `parse_expr`, which calls it. So
any answer to them would run with the rights of the trainer's user. There is no other way in than to replace parts of
it; this file can go when it reads answers without evaluating them.
"""

import re
from ast import literal_eval
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

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
