"""How the built-in rewards that compare with an answer read it: `ANSWERS` and `FAULTS`.

Rows whose answers the run's reward could not read are found before the run, which would end at their first use.
"""

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import NO_CHECK, AnswerCheck
from async_rl.rollouts.rewards.answers import accepted_answers, single_answer
from async_rl.rollouts.rewards.multiple_choice import choices_of, right_choice
from async_rl.rollouts.rewards.row_parts import labels_of
from async_rl.rollouts.rewards.time_limit import TookTooLong, time_limit

MATH = "math"

ANSWER_S = 2.0
"""For one answer; nearly all take milliseconds."""

PLAIN = re.compile(r"\s*-?\d{1,15}(\.\d{1,15})?\s*")
"""What needs no parser."""


def answer_check(config: RewardSection) -> AnswerCheck:
    """Of the rewards of the config that compare with an answer."""
    named = {label: each.name or "" for label, each in config.single_rewards.items()}
    names = {label: name for label, name in named.items() if name in FAULTS}
    if not names:
        return NO_CHECK

    def fault_of(row: Mapping[str, Any], of_mixture: tuple[str, ...]) -> str | None:
        try:
            labels = labels_of(config, row, of_mixture) if config.parts else list(names)
        except ValueError:
            # It says so where it is used.
            return None
        chosen = dict.fromkeys(names[label] for label in labels if label in names)
        return next((fault for name in chosen if (fault := FAULTS[name](row)) is not None), None)

    labels_by_name = {name: sorted(label for label in names if names[label] == name) for name in sorted(names.values())}
    said = ", ".join(f"{name} of {labels}" for name, labels in labels_by_name.items())
    return AnswerCheck(f"{said} by {config.column}", fault_of)


def _fault_of_math(row: Mapping[str, Any]) -> str | None:
    if PLAIN.fullmatch(str(row.get("answer"))):
        return None
    # Imported here: most runs have another reward, or numbers.
    parsed_answer = import_module("async_rl.rollouts.rewards.math").parsed_answer
    limited = threading.current_thread() is threading.main_thread()
    try:
        with time_limit(ANSWER_S) if limited else nullcontext():
            parsed_answer(row)
    except ValueError as error:
        return str(error)
    except TookTooLong:
        return f"the row's answer {row['answer']!r:.200} could not be read in {ANSWER_S:g} s"
    return None


def _fault_by(read: Callable[[Mapping[str, Any]], object]) -> Callable[[Mapping[str, Any]], str | None]:
    def fault_of(row: Mapping[str, Any]) -> str | None:
        try:
            read(row)
        except ValueError as error:
            return str(error)
        return None

    return fault_of


ANSWERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    MATH: single_answer,
    "exact": accepted_answers,
    "f1": accepted_answers,
}
"""Where the answer is in a row; ValueError where it is missing. Checked in the first rows before a run."""

FAULTS: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    MATH: _fault_of_math,
    **{name: _fault_by(ANSWERS[name]) for name in ("exact", "f1")},
    "multiple_choice": _fault_by(lambda row: right_choice(row, choices_of(row))),
}
"""Why a built-in reward cannot read a row's answer, by its name; None if it can."""
