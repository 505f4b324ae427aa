"""`samples.jsonl`: the text of a few groups of each iteration, for inspection; `recorder` writes it.

The groups are the first by their index in the batch: selected by completion, they would be those with short responses.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from async_rl.method.group_proof import GroupProof
from async_rl.method.types import Group, Response, RolloutFacts

NUM_GROUPS = 3
NUM_ROLLOUTS = 2
"""Of each group: the first ones, unless `tracking.all_responses` asks for the texts of all."""

NUM_BRANCHES = 2
"""Maximum responses of one rollout: the first ones."""

MAX_CHARACTERS = 2000
"""Of a prompt or a response; longer ones lose their middle."""

MAX_ROW_CHARACTERS = 500
"""Of a column of the row."""

MAX_COLUMNS = 12
"""Of the row, those that the prompt does not show."""

MAX_TOKENS = 256
"""Of a response, with their log-probs: the first ones."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The end of a text whose last character has further bytes in the next token."""

MAX_TOKENS_OF_CHARACTER = 4
"""A character has at most four bytes, and so four tokens."""

ANSWERS = ("answer", "answers")
"""Shown whatever the prompt says: a short one may stand in it by chance."""

Decode = Callable[[Sequence[int]], str]


class FirstGroups:
    """Of the groups of one iteration after the other: the first `num_groups` by index, among those that were
    offered."""

    def __init__(self, num_groups: int = NUM_GROUPS) -> None:
        self._num_groups = num_groups
        self._groups: list[Group] = []

    def offer(self, group: Group) -> bool:
        """Adds a group; returns whether it is among the first ones so far."""
        same = (other for other in self._groups if other.iteration == group.iteration)
        kept = [other for other in same if other.index != group.index]
        self._groups = sorted([*kept, group], key=lambda group: group.index)[: self._num_groups]
        return any(group is other for other in self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)


def shown_responses(group: Group) -> list[int]:
    """The indices of the responses of a group that are recorded, in the order of their rollouts."""
    rollout_of, first = group.rollout_of, group.first_rollout
    by_rollout = [[i for i, of in enumerate(rollout_of) if first + of == number] for number in range(NUM_ROLLOUTS)]
    return [i for indices in by_rollout for i in indices[:NUM_BRANCHES]]


class Sampled:
    """The groups of one iteration that will be recorded, collected as they finish."""

    def __init__(self) -> None:
        self._groups = FirstGroups()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def offer(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._groups.offer(group)

    def rows(
        self, decode: Decode | None, proven: Iterable[GroupProof] = (), *, all_responses: bool = False
    ) -> Iterator[dict[str, Any]]:
        """One per group; without the texts of prompt and tokens if `decode` is None. `proven` has the trainer's
        log-probs of the groups; with `all_responses` those that have none are shown as texts."""
        logprobs = {row.index: row.shown_logprobs for row in proven if row.shown_logprobs}
        for group in self._groups:
            shown = shown_responses(group)
            found = logprobs.get(group.index, ())
            # The replica of a piece may not have kept those of its responses.
            of_trainer = dict(zip(shown, found, strict=True)) if len(found) == len(shown) else {}
            prompt = "" if decode is None else decode(group.prompt.token_ids)
            row = row_shown(group.prompt.row, prompt)
            yield {
                "iteration": group.iteration,
                "index": group.index,
                "prompt_id": group.prompt.prompt_id,
                "weight_version": group.weight_version,
                **({} if decode is None else {"prompt": shorten(prompt)}),
                **({"row": row} if row else {}),
                "responses": [
                    _response(group, i, decode, of_trainer.get(i, ()))
                    for i in (range(len(group.responses)) if all_responses else shown)
                ],
            }


def row_shown(row: Mapping[str, Any], prompt: str) -> dict[str, str]:
    """The columns of a prompt's row as texts, such as its answer; without those that the text of the prompt shows."""
    texts = {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in row.items()}
    told = {name: text for name, text in texts.items() if text not in prompt or name in ANSWERS}
    return {name: shorten(text, MAX_ROW_CHARACTERS) for name, text in islice(told.items(), MAX_COLUMNS)}


def _response(group: Group, index: int, decode: Decode | None, of_trainer: Sequence[float]) -> dict[str, Any]:
    response, number = group.responses[index], group.rollout_of[index]
    facts, parts = group.rollouts[number], (*group.reward_parts, *group.reward_metrics)
    return {
        "text": shorten(response.text),
        "reward": group.rewards[number],
        **({"reward_parts": {label: rewards[number] for label, rewards in parts}} if parts else {}),
        "num_tokens": response.num_sampled,
        "finish_reason": response.finish_reason,
        **({"rollout": number, "status": facts.status, "num_turns": facts.num_turns} if _has_turns(facts) else {}),
        **(_tokens(response, decode, of_trainer) if decode is not None and of_trainer else {}),
    }


def _tokens(response: Response, decode: Decode, of_trainer: Sequence[float]) -> dict[str, Any]:
    """The first sampled tokens: their texts, and both log-probs of each."""
    ids = [response.token_ids[i] for i in islice(response.sampled, MAX_TOKENS)]
    return {
        "tokens": token_texts(ids, decode),
        "rollout_logprobs": [_rounded(value) for value in response.logprobs[: len(ids)]],
        "trainer_logprobs": [_rounded(value) for value in of_trainer[: len(ids)]],
    }


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds to those before it; together they are the text of all.

    A tokenizer's text of a token alone may lack its leading space, so each is decoded after the one before it. Of a
    character that several tokens make, the last of them has it, and the others have none.
    """
    texts: list[str] = []
    before, first, known = 0, 0, ""
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[before:end])
        is_open = text.endswith(INCOMPLETE) and end - first < MAX_TOKENS_OF_CHARACTER and end < len(token_ids)
        texts.append("" if is_open else text[len(known) :])
        if not is_open:
            before, first = first, end
            known = decode(token_ids[before:end])
    return texts


def _rounded(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _has_turns(facts: RolloutFacts) -> bool:
    return facts.num_turns > 1 or facts.num_responses > 1


def shorten(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
