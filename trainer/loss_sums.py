"""Losses and metrics of the groups trained since the last step, as sums: their count is known only at the step (I4).
And the KL of rollouts to the reference, for algorithms that take it from the reward (`algorithm.kl_in = "reward"`).

Shape legend: G responses and N sampled tokens of one micro-batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal

import torch

from async_rl.method.algorithms import Algorithm, Responses, Rollouts, Tokens, Totals
from async_rl.method.algorithms.base import exact_sum
from async_rl.method.algorithms.log_ratio import KLEstimator, kl_terms
from async_rl.method.group_proof import GroupProof
from async_rl.method.pieces import counts_group
from async_rl.method.types import Group
from trainer.algorithm_checks import ENTROPY, require_loss, require_of_rollouts, require_weights
from trainer.batching.group_codec import joined_tensor
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
        self._gaps = GroupGaps(gap_clip, algorithm.num_corrected)
        self._of_groups: dict[int, torch.Tensor] = {}

    def begin(self, groups: Sequence[Group], kl: Mapping[int, tuple[float, ...]], totals: Totals | None) -> None:
        """Makes advantages and weights of whole groups, which are trained next, or pieces of which are.

        Args:
            kl: `Rollouts.kl` by the index of the group, where the algorithm needs it.
            totals: those of the batch, where the algorithm needs them.

        Raises:
            ConfigError: the algorithm, a user's own one, returns no advantages or weights, or does not use what nodes
                of the pipeline write.
        """
        for group in groups:
            rollouts = Rollouts.of(group, kl.get(group.index))
            returned = {
                "advantages": self._algorithm.advantages(rollouts, totals),
                "weights": self._algorithm.weights(rollouts),
            }
            checked = [require_of_rollouts(self._algorithm, *each, group) for each in returned.items()]
            require_weights(self._algorithm, rollouts, checked[1])
            self._of_groups[group.index] = torch.stack(checked)
            if counts_group(group):
                self._append({f"total/{name}": value for name, value in self._algorithm.sums(rollouts).items()})

    def add(
        self,
        micro_batch: MicroBatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        old_logprobs_N: torch.Tensor | None = None,
        ref_logprobs_N: torch.Tensor | None = None,
        teacher_logprobs_N: torch.Tensor | None = None,
        advantages_N: torch.Tensor | None = None,
        *,
        log_ratios_KN: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adds a micro-batch of begun groups; returns its loss sum.

        Without an old model the policy itself is the old policy, or what the instances reported. `log_ratios_KN` are of
        the policy that sampled, where this is the one that is trained.

        Raises:
            ConfigError: the algorithm, a user's own one, returns no loss.
        """
        rollout_logprobs_N: torch.Tensor | None = None
        if self._algorithm.needs.rollout or self._old_policy == "rollout":
            rollout_logprobs_N = sampled_logprobs(micro_batch, logprobs_N)
        # Under the model that sampled: the published weights.
        sampler_N = logprobs_N.detach() if old_logprobs_N is None or self._old_policy != "model" else old_logprobs_N
        # A copy: a user's own algorithm that changes its tokens must not change what the proof compares.
        self._gaps.add(micro_batch, sampler_N.clone(), log_ratios_KN)
        if self._old_policy == "rollout":
            old_logprobs_N = rollout_logprobs_N
        tokens = Tokens(
            logprobs_N,
            entropy_N,
            logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N,
            ref_logprobs_N,
            teacher_logprobs_N,
            rollout_logprobs_N,
            advantages_N,
            of_nodes(micro_batch, "token_weights", logprobs_N),
            of_nodes(micro_batch, "token_rewards", logprobs_N),
        )
        responses = self.responses_of(micro_batch, logprobs_N)
        returned = self._algorithm.loss_sum(tokens, responses)
        loss_sum = require_loss(self._algorithm, returned, is_trained=logprobs_N.requires_grad)
        self._append({"loss": loss_sum.loss.detach(), "tokens": len(logprobs_N)})
        self._append({f"metric/{name}": value for name, value in loss_sum.metrics.items()})
        self._append({f"metric/{ENTROPY}": entropy_N.detach().sum()})
        return loss_sum.loss

    def note_untrained(self, num_groups: int) -> None:
        """Counts groups that were added without a backward pass."""
        self._append({"untrained": num_groups})

    def take_rows(self, groups: Sequence[Group]) -> list[GroupProof]:
        """The ledger rows of groups that were added; to be called once per group. Waits once for the device."""
        return self._gaps.pop_rows(groups)

    def totals(self) -> dict[str, float]:
        """All sums as Python floats. Waits once for the device."""
        terms = [term for terms in self._terms.values() for term in terms]
        on_host = iter(to_host([term.double() for term in terms if isinstance(term, torch.Tensor)]))
        values = iter([float(next(on_host) if isinstance(term, torch.Tensor) else term) for term in terms])
        return {name: exact_sum(islice(values, len(terms))) for name, terms in self._terms.items()}

    def clear(self) -> None:
        self._terms.clear()
        self._gaps.clear()
        self._of_groups.clear()

    def responses_of(self, micro_batch: MicroBatch, like: torch.Tensor) -> Responses:
        """What the loss needs to know of a micro-batch's responses; advantages are from the rewards of whole groups."""
        slices, labels = micro_batch.slices, micro_batch.labels
        parts = [
            self._of_groups[part.group.index][:, [part.group.first_rollout + number for number in part.rollouts]]
            for part in slices
        ]
        numbers = {index: number for number, index in enumerate(dict.fromkeys(part.group.index for part in slices))}
        groups = [numbers[part.group.index] for part in slices for _ in part.indices]
        advantages_G, weights_G, groups_G = to_device(
            torch.cat([torch.cat([torch.empty(2, 0), *parts], dim=1), torch.tensor([groups])]).to(like.dtype),
            like.device,
        )
        return Responses(advantages_G, weights_G, labels.lengths_G, labels.rollout_lengths_G, groups_G.long())

    def _append(self, terms: Mapping[str, float | torch.Tensor]) -> None:
        for name, term in terms.items():
            self._terms.setdefault(name, []).append(term)


def sampled_logprobs(micro_batch: MicroBatch, like: torch.Tensor) -> torch.Tensor:
    """The log-probs that the instances reported of a micro-batch's sampled tokens, [N], as `like` in type and place."""
    reported = (response.logprobs for part in micro_batch.slices for response in part.responses)
    return to_device(joined_tensor(reported, like.dtype), like.device)


def of_nodes(
    micro_batch: MicroBatch, name: Literal["token_weights", "token_rewards"], like: torch.Tensor
) -> torch.Tensor | None:
    """What nodes of the pipeline say of a micro-batch's sampled tokens, [N], as `like`; None if they say nothing."""
    said = [getattr(response, name) for part in micro_batch.slices for response in part.responses]
    if not said or said[0] is None:
        return None
    return to_device(joined_tensor(said, like.dtype), like.device)


def rollout_kl(
    passes: Iterable[Sequence[MicroBatch]], ref_logprobs: Sequence[list[torch.Tensor] | None], estimator: KLEstimator
) -> dict[int, tuple[float, ...]]:
    """Each group's KL per rollout, summed over its sampled tokens, by the group's index; waits once for the device.

    Empty before the last pipeline stage.

    The policy's side are the log-probs that the instances reported: those of the weights that sampled.

    Args:
        passes: their micro-batches, of whole groups.
        ref_logprobs: the reference's, of the N sampled tokens of each micro-batch of each pass.
    """
    scored = [
        pair
        for batches, logprobs in zip(passes, ref_logprobs, strict=True)
        if logprobs
        for pair in zip(batches, logprobs, strict=True)
    ]
    terms = [kl_terms(sampled_logprobs(batch, ref_N), ref_N, estimator) for batch, ref_N in scored]
    found: dict[int, list[float]] = {}
    for (batch, _), terms_N in zip(scored, to_host(terms), strict=True):
        responses = [
            (part.group, rollout, i)
            for part in batch.slices
            for rollout, i in zip(part.rollouts, part.indices, strict=True)
        ]
        sizes = [group.responses[i].num_sampled for group, _, i in responses]
        for (group, rollout, _), own_N in zip(responses, terms_N.split(sizes), strict=True):
            sums = found.setdefault(group.index, [0.0] * len(group.rollouts))
            sums[rollout] += float(own_N.double().sum())
    return {index: tuple(sums) for index, sums in found.items()}
