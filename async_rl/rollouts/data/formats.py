"""Published data sets that are recognised by their columns, so that they need no `columns` in the config.

GSM8K; MATH-500, DeepScaleR and AIME 2024 and 2025; DAPO-Math-17k, whose form verl's data sets share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.rollouts.data.row import Row

GSM8K_MARK = "####"


def _as_it_is(answer: Any) -> Any:
    return answer


def _after_the_mark(answer: Any) -> Any:
    """The number at the end of a solution of GSM8K, without separators of thousands."""
    return answer.rpartition(GSM8K_MARK)[2].strip().replace(",", "") if isinstance(answer, str) else answer


@dataclass(frozen=True, slots=True)
class Format:
    """`columns` are like those of a config; `answer` makes the answer of what stands in its column."""

    name: str
    columns: Mapping[str, str]
    answer: Callable[[Any], Any]


GSM8K = Format("GSM8K", {"prompt": "question", "answer": "answer"}, _after_the_mark)
MATH = Format("MATH-500, DeepScaleR or AIME", {"prompt": "problem", "answer": "answer"}, _as_it_is)
VERL = Format("DAPO-Math-17k or verl", {"prompt": "prompt", "answer": "reward_model.ground_truth"}, _as_it_is)


def recognise(row: Row) -> Format | None:
    """The format of a source with this first row."""
    if {"question", "answer"} <= row.keys() and GSM8K_MARK in str(row["answer"]):
        return GSM8K
    if {"problem", "answer"} <= row.keys() and "prompt" not in row:
        return MATH
    reward_model = row.get("reward_model")
    has_truth = isinstance(reward_model, dict) and reward_model.get("ground_truth") not in (None, "")
    return VERL if has_truth and isinstance(row.get("prompt"), list) and "answer" not in row else None
