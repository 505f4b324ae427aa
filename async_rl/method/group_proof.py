"""The proof of one group, a row of the ledger: made on the rank that trained it, gathered, checked and written."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.types import DIGEST_CHARACTERS, Group, Response, RewardParts, WeightVersion


@dataclass(frozen=True, slots=True)
class GroupProof:
    """One ledger row: a trained group's content and how far the trainer's log-probs were from the rollout's.

    A group that a selection passed over has a row that is not `is_trained`, and no gaps.

    `versions` are all weight versions its tokens were sampled from; `gaps` compares the trainer's log-probs of its
    response tokens (the sampled ones) with the rollout's, by instance; `samples` digests its responses, what they
    observed included. `num_prompt_tokens` counts each prompt once that a response follows. `num_branches` responses are
    further ones of a rollout that has one already, `num_truncated` counts rollouts that ended at a limit,
    `num_corrected` sampled tokens whose loss an importance correction changed. `rollout_lengths` are the sampled tokens
    of each rollout, `shown_logprobs` the trainer's log-probs of the responses that `samples.jsonl` may show
    (`async_rl.records.samples`), if it may show the group.
    """

    index: int
    prompt_id: str
    num_responses: int
    num_prompt_tokens: int
    num_response_tokens: int
    versions: tuple[WeightVersion, ...]
    rewards: tuple[float, ...]
    attempts: int
    gaps: tuple[tuple[str, LogprobGaps], ...]
    num_continued: int = 0
    num_resampled: int = 0
    samples: str = ""
    num_turns: int = 0
    num_branches: int = 0
    num_truncated: int = 0
    reward_parts: RewardParts = ()
    num_corrected: int = 0
    is_trained: bool = True
    rollout_lengths: tuple[int, ...] = ()
    shown_logprobs: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(
        cls,
        group: Group,
        gaps: Mapping[str, LogprobGaps],
        num_corrected: int = 0,
        shown_logprobs: tuple[tuple[float, ...], ...] = (),
    ) -> "GroupProof":
        """The row of a trained group with the given gaps, by instance."""
        return cls(
            index=group.index,
            prompt_id=group.prompt.prompt_id,
            num_responses=len(group.responses),
            num_prompt_tokens=sum(map(len, group.responses_by_prompt)),
            num_response_tokens=group.num_response_tokens,
            versions=tuple(sorted(frozenset().union(*(r.weight_versions for r in group.responses)))),
            rewards=group.rewards,
            attempts=group.attempts,
            gaps=tuple(gaps.items()),
            num_continued=sum(response.num_continued for response in group.responses),
            num_resampled=sum(response.num_resampled for response in group.responses),
            samples=_digest_of_samples(group.responses),
            num_turns=sum(facts.num_turns for facts in group.rollouts),
            num_branches=len(group.responses) - len(group.rollouts),
            num_truncated=sum(facts.status == "truncated" for facts in group.rollouts),
            reward_parts=(*group.reward_parts, *group.reward_metrics),
            num_corrected=num_corrected,
            rollout_lengths=group.rollout_lengths,
            shown_logprobs=shown_logprobs,
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "GroupProof":
        """The row from its JSON form, as written with `asdict`."""
        gaps = tuple((instance, LogprobGaps.from_json(value)) for instance, value in row["gaps"])
        parts = tuple((label, tuple(values)) for label, values in row.get("reward_parts", ()))
        names = ("versions", "rewards", "rollout_lengths")
        lists = {name: tuple(row[name]) for name in names if name in row}
        shown = tuple(map(tuple, row.get("shown_logprobs", ())))
        return cls(**{**row, **lists, "reward_parts": parts, "gaps": gaps, "shown_logprobs": shown})

    @property
    def num_rollouts(self) -> int:
        return self.num_responses - self.num_branches

    @property
    def all_gaps(self) -> LogprobGaps:
        """Over all its response tokens."""
        return LogprobGaps.total(gaps for _, gaps in self.gaps)


def _digest_of_samples(responses: Sequence[Response]) -> str:
    """Of the tokens of responses and their order; of prompts of their own and observed ranges, too."""
    digest = hashlib.sha256()
    for response in responses:
        own = response.prompt_ids
        sizes = None if own is None else len(own), len(response.token_ids), response.observed
        digest.update(repr(sizes).encode())
        if own is not None:
            digest.update(own.buffer)
        digest.update(response.token_ids.buffer)
    return digest.hexdigest()[:DIGEST_CHARACTERS]
