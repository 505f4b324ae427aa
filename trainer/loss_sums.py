"""Losses and metrics of the groups trained since the last step, as sums: their count is known only at the step (I4).

Shape legend: G responses and N sampled tokens of one micro-batch.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import torch

from async_rl.algorithms import Algorithm, Responses
from async_rl.types import Group, GroupProof
from trainer.batching.shared_prompt import MicroBatch
from trainer.devices.host_copies import to_device, to_host
from trainer.logprob_gaps import GroupGaps


class LossSums:
    """Sums over one rank's micro-batches, on the last pipeline stage."""

    def __init__(self, algorithm: Algorithm, old_policy: str, gap_clip: float) -> None:
        """`gap_clip`: see `LogprobGaps`."""
        self._algorithm = algorithm
        self._old_policy = old_policy
        self._terms: dict[str, list[float | torch.Tensor]] = {}
        self._gaps = GroupGaps(gap_clip)

    def add(
        self,
        micro_batch: MicroBatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        old_logprobs_N: torch.Tensor | None,
        ref_logprobs_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds a micro-batch; returns its loss sum. Without an old model the policy itself is the old policy."""
        if old_logprobs_N is None:
            old_logprobs_N = logprobs_N.detach()
        responses = self._responses(micro_batch, logprobs_N)
        loss_sum = self._algorithm.loss_sum(logprobs_N, old_logprobs_N, ref_logprobs_N, responses)
        self._append({"loss": loss_sum.loss.detach(), "count": loss_sum.count, "tokens": len(logprobs_N)})
        self._append({f"metric/{name}": value for name, value in loss_sum.metrics.items()})
        self._append({"metric/entropy": entropy_N.sum()})
        # The model that sampled: the published weights.
        sampler_N = old_logprobs_N if self._old_policy == "model" else logprobs_N.detach()
        self._gaps.add(micro_batch, sampler_N)
        return loss_sum.loss

    def note_untrained(self, num_groups: int) -> None:
        """Counts groups that were added without a backward pass."""
        self._append({"untrained": num_groups})

    def take_rows(self, groups: Sequence[Group]) -> list[GroupProof]:
        """The ledger rows of groups that were added; to be called once per group. Waits once for the device."""
        return [GroupProof.of(group, gaps) for group, gaps in zip(groups, self._gaps.take(groups), strict=True)]

    def totals(self) -> dict[str, float]:
        """All sums as Python floats. Waits once for the device."""
        terms = [term for terms in self._terms.values() for term in terms]
        on_host = iter(to_host([term.double() for term in terms if isinstance(term, torch.Tensor)]))
        values = iter([float(next(on_host) if isinstance(term, torch.Tensor) else term) for term in terms])
        return {name: sum(islice(values, len(terms))) for name, terms in self._terms.items()}

    def clear(self) -> None:
        self._terms.clear()
        self._gaps.clear()

    def _responses(self, micro_batch: MicroBatch, like: torch.Tensor) -> Responses:
        """What the loss needs to know of a micro-batch's responses; advantages are from the rewards of whole groups."""
        slices, labels = micro_batch.slices, micro_batch.labels
        parts = [self._algorithm.advantages(part.group.rewards)[part.rollouts] for part in slices]
        return Responses(
            advantages_G=to_device(torch.cat([torch.empty(0), *parts]).to(like.dtype), like.device),
            lengths_G=labels.lengths_G,
            rollout_lengths_G=labels.rollout_lengths_G,
            num_rollouts=sum(part.num_rollouts for part in slices),
        )

    def _append(self, terms: Mapping[str, float | torch.Tensor]) -> None:
        for name, term in terms.items():
            self._terms.setdefault(name, []).append(term)
