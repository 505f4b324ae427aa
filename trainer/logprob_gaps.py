"""Compares the trainer's log-probs with the rollout's while groups are trained; for `loss_sums.py`.

Shape legend: N sampled tokens of one micro-batch, K other temperatures (`proof.draws.POWERS`).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.draws import POWERS
from async_rl.method.proof.logprob_gaps import BINS_PER_OCTAVE, SMALLEST, LogprobGaps
from async_rl.method.types import Group, GroupKey, Response
from async_rl.records.samples import MAX_TOKENS, FirstGroups, shown_responses
from trainer.batching.group_codec import joined_tensor
from trainer.batching.group_slice import GroupSlice
from trainer.batching.shared_prompt import MicroBatch
from trainer.devices.host_copies import to_host

MAX_EXPONENT = 700.0
"""exp(d) of a larger d overflows float64; its contribution to k3 exceeds any limit anyway."""

MAX_GAP = 1e30
"""Larger gaps count as not finite: no two log-probs differ by so much, and their squares would overflow."""


class GroupGaps:
    """The log-probs of the groups that were trained, until `pop_rows` computes their gaps.

    `clip`: see `LogprobGaps`; `num_corrected`: see `Algorithm`. Log-probs stay on the device until their groups are
    taken, all in one copy: the device is waited for once.
    """

    def __init__(self, clip: float, num_corrected: Callable[[torch.Tensor], int] = lambda gaps_N: 0) -> None:
        self._clip = clip
        self._num_corrected = num_corrected
        self._facts: dict[GroupKey, list[tuple[GroupSlice, torch.Tensor]]] = {}
        self._first = FirstGroups()

    def add(self, micro_batch: MicroBatch, logprobs_N: torch.Tensor, log_ratios_KN: torch.Tensor | None = None) -> None:
        """Stores the trainer's log-probs of a micro-batch's sampled tokens, and how likely other temperatures make them
        (see `response_logprobs`), where that is known."""
        if log_ratios_KN is None:
            log_ratios_KN = logprobs_N.new_full((len(POWERS), len(logprobs_N)), math.nan)
        facts = torch.cat([logprobs_N.detach()[None], log_ratios_KN])
        sizes = [sum(response.num_sampled for response in part.responses) for part in micro_batch.slices]
        for part, own in zip(micro_batch.slices, facts.split(sizes, dim=1), strict=True):
            self._facts.setdefault(part.group.key, []).append((part, own))

    def pop_rows(self, groups: Sequence[Group]) -> list[GroupProof]:
        """The row of each group, with the gaps of the tokens that each instance sampled.

        Turns of several requests are under `MIXED`.
        """
        of_groups = [self._facts.pop(group.key) for group in groups]
        on_host = iter(to_host([facts for parts in of_groups for _, facts in parts]))
        return [
            self._row(group, [(part, next(on_host).view_as(facts)) for part, facts in parts])
            for group, parts in zip(groups, of_groups, strict=True)
        ]

    def clear(self) -> None:
        self._facts.clear()

    def _row(self, group: Group, parts: Sequence[tuple[GroupSlice, torch.Tensor]]) -> GroupProof:
        shown = _shown_logprobs(group, [(part, facts[0]) for part, facts in parts]) if self._first.offer(group) else ()
        return GroupProof.of(group, *self._by_instance(parts), shown)

    def _by_instance(self, parts: Sequence[tuple[GroupSlice, torch.Tensor]]) -> tuple[dict[str, LogprobGaps], int]:
        by_instance: dict[str, list[torch.Tensor]] = {}
        num_corrected = 0
        for part, facts in parts:
            for response, own in _gaps_of(part, facts.double()):
                num_corrected += self._num_corrected(own[0])
                instances, lengths = zip(*response.sampled_by, strict=True)
                for instance, sampled in zip(instances, own.split(lengths, dim=1), strict=True):
                    by_instance.setdefault(instance, []).append(sampled)
        sums = {
            instance: sums_of(facts[0], self._clip, facts[1:])
            for instance, facts in sorted((name, torch.cat(sampled, dim=1)) for name, sampled in by_instance.items())
        }
        return sums, num_corrected


def sums_of(gaps_N: torch.Tensor, clip: float, log_ratios_KN: torch.Tensor | None = None) -> LogprobGaps:
    """The sums over float64 gaps on the host, and over log-ratios, NaN where they are not known.

    The log-ratios are to the trainer's log-probs; with the gap added they are to those reported, which is what tokens
    are drawn from: noise between the two does not count as another distribution.
    """
    if log_ratios_KN is None:
        log_ratios_KN = gaps_N.new_full((len(POWERS), len(gaps_N)), math.nan)
    ratios_KN = log_ratios_KN + gaps_N
    ratios_KN = ratios_KN[:, ratios_KN.isfinite().all(0)]
    finite = gaps_N[gaps_N.abs() < MAX_GAP]
    size, clipped = finite.abs(), finite.clamp(-clip, clip)
    bins = (BINS_PER_OCTAVE * (size / SMALLEST).log2()).ceil().clamp(min=0).long()
    return LogprobGaps(
        count=len(finite),
        num_bad=len(gaps_N) - len(finite),
        signed_sum=float(finite.sum()),
        abs_sum=float(size.sum()),
        squares=float(finite.square().sum()),
        clipped_sum=float(clipped.sum()),
        clipped_squares=float(clipped.square().sum()),
        k3_sum=float((finite.clamp(max=MAX_EXPONENT).expm1() - finite).sum()),
        largest=float(size.max()) if len(size) else 0.0,
        bins=tuple((number, count) for number, count in enumerate(torch.bincount(bins).tolist()) if count),
        num_drawn=ratios_KN.shape[1],
        hotter_sum=float(ratios_KN[0].sum()),
        colder_sum=float(ratios_KN[1].sum()),
    )


def _shown_logprobs(group: Group, parts: Sequence[tuple[GroupSlice, torch.Tensor]]) -> tuple[tuple[float, ...], ...]:
    """The trainer's log-probs of the first tokens of the responses that `samples.jsonl` may show."""
    of_response = {
        index: own
        for part, logprobs in parts
        for index, own in zip(part.indices, logprobs.split([r.num_sampled for r in part.responses]), strict=True)
    }
    return tuple(tuple(of_response[index][:MAX_TOKENS].tolist()) for index in shown_responses(group))


def _gaps_of(part: GroupSlice, facts: torch.Tensor) -> Iterator[tuple[Response, torch.Tensor]]:
    """The responses of a slice, each with its sampled tokens' gaps and what else is known of them: [1 + K, N]."""
    responses = part.responses
    for response, own in zip(responses, facts.split([r.num_sampled for r in responses], dim=1), strict=True):
        reported = joined_tensor([response.logprobs], torch.float64)
        assert len(reported) == own.shape[1], f"{len(reported)} rollout log-probs for {own.shape[1]} tokens"
        yield response, torch.cat([(own[0] - reported)[None], own[1:]])
