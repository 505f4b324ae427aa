"""The share of words that a response's answer has in common with the row's: SQuAD's F1, the best over several answers.

With c common words, F1 = 2 c / (words of the one + words of the other); arXiv 1606.05250, section 6.1.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import accepted_answers, answer_of, normalize
from async_rl.rollouts.rewards.base import correct_at


@correct_at(1.0)
def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
    """`row`: see `accepted_answers`."""
    accepted = [normalize(answer).split() for answer in accepted_answers(row)]
    answers = [normalize(answer_of(response.text)).split() for response in responses]
    return [max(f1(answer, words) for words in accepted) for answer in answers]


def f1(words: Sequence[str], expected: Sequence[str]) -> float:
    """Of two lists of words; two empty ones are equal."""
    if not words and not expected:
        return 1.0
    num_common = (Counter(words) & Counter(expected)).total()
    return 2 * num_common / (len(words) + len(expected))
