"""The reward of `quickstart smollm2`: whether the response is exactly the right number, and ended.

reasoning-gym's own score of this task is the same, but for a hundredth that any other answer gets.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def right_number(prompt: Any, responses: Sequence[Any], row: Mapping[str, Any]) -> list[float]:
    """One reward per response, 1 or 0. Rows have `answer`."""
    return [float(response.finish_reason == "stop" and response.text == row["answer"]) for response in responses]


right_number.correct_at = 1.0  # type: ignore[attr-defined]
