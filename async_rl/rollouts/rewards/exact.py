"""1 for a response whose answer is one of the row's, up to case, punctuation, articles and space; else 0."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import accepted_answers, answer_of, normalize
from async_rl.rollouts.rewards.base import correct_at


@correct_at(1.0)
def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
    """`row`: see `accepted_answers`."""
    accepted = {normalize(answer) for answer in accepted_answers(row)}
    return [float(normalize(answer_of(response.text)) in accepted) for response in responses]
