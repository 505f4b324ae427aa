"""The reward of `quickstart smollm2`: 1 for exactly the right number, and little for one that is near.

The right number alone would leave most groups of the first iterations without a signal: all their responses are wrong.
A response that is no number, or does not end by itself, gets nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

NEXT_TO_IT = 0.25
"""Shared by both neighbours of the right number; less with the distance from it."""


def right_number(prompt: Any, responses: Sequence[Any], row: Mapping[str, Any]) -> list[float]:
    """One reward per response, between 0 and 1; 1 is exactly right. Rows have `answer`."""
    return [_score(response.text, row["answer"]) if response.finish_reason == "stop" else 0.0 for response in responses]


def _score(text: str, answer: str) -> float:
    if text == answer:
        return 1.0
    if not re.fullmatch(r"-?[0-9]{1,6}", text):
        return 0.0
    return NEXT_TO_IT / max(abs(int(text) - int(answer)), 1)


right_number.correct_at = 1.0  # type: ignore[attr-defined]
