"""The proof of one group, a row of the ledger: made on the rank that trained it, gathered, checked and written."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
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

    A piece of a group has a row of its own until `join_pieces`: `first_rollout` is the number of its first one, None
    in the row of a whole group, and `samples` the digests of its responses, one after the other. The row of the whole
    group then tells its `num_pieces`.
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
    first_rollout: int | None = None
    num_pieces: int = 1

    @classmethod
    def of(
        cls,
        group: Group,
        gaps: Mapping[str, LogprobGaps],
        num_corrected: int = 0,
        shown_logprobs: tuple[tuple[float, ...], ...] = (),
    ) -> "GroupProof":
        """The row of a trained group with the given gaps, by instance."""
        digests = "".join(map(_digest_of_response, group.responses))
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
            samples=_digest_of(digests) if group.whole is None else digests,
            num_turns=sum(facts.num_turns for facts in group.rollouts),
            num_branches=len(group.responses) - len(group.rollouts),
            num_truncated=sum(group.truncated),
            reward_parts=(*group.reward_parts, *group.reward_metrics),
            num_corrected=num_corrected,
            rollout_lengths=group.rollout_lengths,
            shown_logprobs=shown_logprobs,
            first_rollout=None if group.whole is None else group.first_rollout,
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


def join_pieces(rows: Iterable[GroupProof]) -> list[GroupProof]:
    """The rows, those of pieces that make up a group from its first rollout on as one.

    Pieces that leave a gap or overlap stay as they are, for the ledger to report; it also counts a group's rollouts.
    """
    joined: list[GroupProof] = []
    pieces: dict[int, list[GroupProof]] = {}
    for row in rows:
        if row.first_rollout is None:
            joined.append(row)
        else:
            pieces.setdefault(row.index, []).append(row)
    for own in pieces.values():
        own.sort(key=lambda row: row.first_rollout or 0)
        ends = [0, *accumulate(row.num_rollouts for row in own)]
        fit = [row.first_rollout for row in own] == ends[:-1]
        joined += [_joined(own)] if fit else own
    return joined


def _joined(pieces: Sequence[GroupProof]) -> GroupProof:
    """The row of the group that consecutive pieces make up: the one that it would have had in one piece.

    Without a piece's log-probs to show none are shown.
    """
    first = pieces[0]
    by_instance: dict[str, list[LogprobGaps]] = {}
    for instance, gaps in chain.from_iterable(row.gaps for row in pieces):
        by_instance.setdefault(instance, []).append(gaps)
    names = ("num_responses", "num_response_tokens", "num_continued", "num_resampled", "num_turns", "num_branches")
    sums = {name: sum(getattr(row, name) for row in pieces) for name in (*names, "num_truncated", "num_corrected")}
    values = zip(*(row.reward_parts for row in pieces), strict=True)
    return replace(
        first,
        versions=tuple(sorted({version for row in pieces for version in row.versions})),
        rewards=tuple(chain.from_iterable(row.rewards for row in pieces)),
        gaps=tuple((instance, LogprobGaps.total(by_instance[instance])) for instance in sorted(by_instance)),
        samples=_digest_of("".join(row.samples for row in pieces)),
        reward_parts=tuple((parts[0][0], tuple(chain.from_iterable(own for _, own in parts))) for parts in values),
        rollout_lengths=tuple(chain.from_iterable(row.rollout_lengths for row in pieces)),
        shown_logprobs=tuple(chain.from_iterable(row.shown_logprobs for row in pieces)),
        first_rollout=None,
        num_pieces=len(pieces),
        **sums,
    )


def _digest_of_response(response: Response) -> str:
    """Of its tokens; of a prompt of its own and observed ranges, too."""
    own = response.prompt_ids
    sizes = None if own is None else len(own), len(response.token_ids), response.observed
    digest = hashlib.sha256(repr(sizes).encode())
    if own is not None:
        digest.update(own.buffer)
    digest.update(response.token_ids.buffer)
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def _digest_of(digests: str) -> str:
    """Of the digests of responses, in their order."""
    return hashlib.sha256(digests.encode()).hexdigest()[:DIGEST_CHARACTERS]
