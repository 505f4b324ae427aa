"""Finds rows whose answers the run's reward could not read, before the run: `math` would end it at their first use."""

import re
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.rewards.row_parts import labels_of
from async_rl.rewards.time_limit import TookTooLong, time_limit
from async_rl.types import NO_CHECK, AnswerCheck

MATH = "math"

ANSWER_S = 2.0
"""For one answer; nearly all take milliseconds."""

PLAIN = re.compile(r"\s*-?\d{1,15}(\.\d{1,15})?\s*")
"""What needs no parser."""


def answer_check(config: RewardSection) -> AnswerCheck:
    """Of the reward of the config; only `math` reads answers that it may not understand."""
    labels = {label for label, each in config.single_rewards.items() if each.name == MATH}
    if not labels:
        return NO_CHECK

    def fault_of(row: Mapping[str, Any], of_mixture: tuple[str, ...]) -> str | None:
        try:
            if config.parts and labels.isdisjoint(labels_of(config, row, of_mixture)):
                return None
        except ValueError:
            # It says so where it is used.
            return None
        return _fault_of_math(row)

    return AnswerCheck(f"{MATH} of {sorted(labels)} by {config.column}", fault_of)


def _fault_of_math(row: Mapping[str, Any]) -> str | None:
    if PLAIN.fullmatch(str(row.get("answer"))):
        return None
    # Imported here: most runs have another reward, or numbers.
    parsed_answer = import_module("async_rl.rewards.math").parsed_answer
    limited = threading.current_thread() is threading.main_thread()
    try:
        with time_limit(ANSWER_S) if limited else nullcontext():
            parsed_answer(row)
    except ValueError as error:
        return str(error)
    except TookTooLong:
        return f"the row's answer {row['answer']!r:.200} could not be read in {ANSWER_S:g} s"
    return None
