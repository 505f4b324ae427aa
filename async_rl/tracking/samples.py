"""`samples.jsonl`: the text of a few groups of each iteration, for inspection; `recorder` writes it.

The groups are the first by their index in the batch, among those that the writing replica trains: selected by
completion, they would be those with short responses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from async_rl.tracking.rotation import Rotation
from async_rl.types import Group, RolloutFacts

SAMPLES = Rotation("samples.jsonl", max_bytes=16 * 2**20, num_kept=4)

NUM_GROUPS = 3
NUM_ROLLOUTS = 2
"""Of each group: the first ones."""

NUM_BRANCHES = 2
"""Maximum responses of one rollout: the first ones."""

MAX_CHARACTERS = 2000
"""Of a prompt or a response; longer ones lose their middle."""

Decode = Callable[[Sequence[int]], str]


class Sampled:
    """The groups of one iteration that will be recorded, collected as they finish."""

    def __init__(self) -> None:
        self._groups: list[Group] = []

    def offer(self, groups: Iterable[Group]) -> None:
        self._groups = sorted([*self._groups, *groups], key=lambda group: group.index)[:NUM_GROUPS]

    def rows(self, decode: Decode | None) -> Iterator[dict[str, Any]]:
        """One per group; without the prompt's text if `decode` is None."""
        for group in self._groups:
            yield {
                "iteration": group.iteration,
                "index": group.index,
                "prompt_id": group.prompt.prompt_id,
                "weight_version": group.weight_version,
                **({} if decode is None else {"prompt": shorten(decode(group.prompt.token_ids))}),
                "responses": [row for number in range(NUM_ROLLOUTS) for row in _responses(group, number)],
            }


def _responses(group: Group, number: int) -> Iterator[dict[str, Any]]:
    """Those of the rollout of that number, if the group has it."""
    own = [response for response, of in zip(group.responses, group.rollout_of, strict=True) if of == number]
    for response in own[:NUM_BRANCHES]:
        facts, parts = group.rollouts[number], group.reward_parts
        yield {
            "text": shorten(response.text),
            "reward": group.rewards[number],
            **({"reward_parts": {label: rewards[number] for label, rewards in parts}} if parts else {}),
            "num_tokens": response.num_sampled,
            "finish_reason": response.finish_reason,
            **({"rollout": number, "status": facts.status, "num_turns": facts.num_turns} if _has_turns(facts) else {}),
        }


def _has_turns(facts: RolloutFacts) -> bool:
    return facts.num_turns > 1 or facts.num_responses > 1


def shorten(text: str) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
