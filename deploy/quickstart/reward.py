"""The quickstart's reward: reasoning-gym's own score, plus an equal share for a word that is exactly right.

The score alone gives most of its points to nearly right answers; the exact half makes the last letter count. A response
that does not end by itself has no answer, so its reward is 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import reasoning_gym

TASK = reasoning_gym.create_dataset("spell_backward", seed=0, size=1)


def spelled_backward(prompt: Any, responses: Sequence[Any], row: Mapping[str, Any]) -> list[float]:
    """One reward per response, between 0 and 1; 1 is exactly right. Rows have `answer`."""
    return [
        (TASK.score_answer(response.text, {"answer": row["answer"]}) + (response.text == row["answer"])) / 2
        if response.finish_reason == "stop"
        else 0.0
        for response in responses
    ]


spelled_backward.correct_at = 1.0  # type: ignore[attr-defined]
