"""The trainer's interface of an algorithm.

An algorithm turns the rewards of a group into advantages and log-probs into a loss that is a sum, so that groups can be
trained in the order in which they finish. What the sum is divided by is known only with the whole batch (invariant
I4): `sums` of the groups are added up, and `denominator` makes one number of the totals.

Shape legend: G rollouts of one group, or responses of a micro-batch; N sampled tokens of the responses, concatenated.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from async_rl.method.types import Group

Totals = Mapping[str, float]
"""What `Algorithm.sums` says of groups, added over all groups of an optimizer step, over all replicas."""


def added(parts: Iterable[Totals]) -> dict[str, float]:
    """Their sums, rounded once: thousands of groups, in any order, have the same ones."""
    terms: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            terms.setdefault(name, []).append(value)
    return {name: exact_sum(values) for name, values in terms.items()}


def exact_sum(values: Iterable[float]) -> float:
    """Rounded once; infinite or NaN where a term or what is beyond the largest number makes it so."""
    terms = list(values)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return float(sum(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm reads besides the policy's and the old policy's log-probs.

    `reference`: log-probs under the initial policy. `teacher`: those under the model `algorithm.teacher`. `rollout`:
    those that the instances reported. `reward_kl`: `Rollouts.kl`. `whole_groups`: a group must not be split over
    micro-batches. `totals`: the batch's totals before the first advantage, which only `train.mode = "synchronous"` has.
    `values`: advantages of tokens, from a critic's values (`gae.py`).
    """

    reference: bool = False
    teacher: bool = False
    rollout: bool = False
    reward_kl: bool = False
    whole_groups: bool = False
    totals: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The G rollouts of a group, as far as advantages depend on them; all finite, one entry each.

    `lengths` are sampled tokens; `truncated` ended at a limit. `parts` are the named parts of which the reward is a
    weighted sum, if it is composed of several. `kl` is a rollout's KL to the reference, summed over its tokens, for an
    algorithm that needs `reward_kl`. `weights` are what a node of the pipeline says that they count, which an algorithm
    multiplies its own by; empty if it says nothing.
    """

    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    kl: tuple[float, ...] | None = None
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, group: Group, kl: tuple[float, ...] | None = None) -> "Rollouts":
        """Those of a group; of a piece those of its whole group."""
        of = group if group.whole is None else group.whole
        return cls(
            rewards=of.rewards,
            lengths=of.rollout_lengths,
            truncated=of.truncated,
            parts=dict(of.reward_parts),
            kl=kl,
            weights=of.weights,
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """Log-probs of the N sampled tokens of some responses, float32 [N] (float64 if the policy computes in it).

    `logprobs_N` and `entropy_N` (of the distribution that each token was drawn from) are the policy's and carry its
    gradient. `old_logprobs_N` are of the policy that sampled, as `algorithm.old_policy` says. The others are None
    unless the algorithm `Needs` them.
    """

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    old_logprobs_N: torch.Tensor
    ref_logprobs_N: torch.Tensor | None = None
    teacher_logprobs_N: torch.Tensor | None = None
    rollout_logprobs_N: torch.Tensor | None = None
    advantages_N: torch.Tensor | None = None
    """Of single tokens, from a critic's values."""
    weights_N: torch.Tensor | None = None
    rewards_N: torch.Tensor | None = None
    """Of nodes of the pipeline: factors of tokens' losses, and what is added to their advantages."""

    def __len__(self) -> int:
        return len(self.logprobs_N)


@dataclass(frozen=True, slots=True)
class Responses:
    """The G responses whose sampled tokens a loss is summed over; the tokens of a response are contiguous, in order.

    A rollout is one response, or several if it has branches; these need not be in one micro-batch. `advantages_G` and
    `weights_G` are those of the rollouts, in the dtype of the log-probs. `lengths_G`, int64, are the responses' sampled
    tokens, N in all; `rollout_lengths_G`, int64, those of each response's whole rollout. `groups_G`, int64, numbers the
    groups of the micro-batch from 0.
    """

    advantages_G: torch.Tensor
    weights_G: torch.Tensor
    lengths_G: torch.Tensor
    rollout_lengths_G: torch.Tensor
    groups_G: torch.Tensor

    def per_token(self, values_G: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """A value per response -> the same for each of its tokens, [N].

        With the number of tokens given, the host need not wait for the device to sum the lengths.
        """
        return values_G.repeat_interleave(self.lengths_G, dim=0, output_size=num_tokens)

    def summed(self, values_N: torch.Tensor) -> torch.Tensor:
        """A value per token -> its sum over each response, [G]."""
        numbers_G = torch.arange(len(self.lengths_G), device=self.lengths_G.device)
        zeros_G = values_N.new_zeros(len(self.lengths_G))
        return zeros_G.index_add(0, self.per_token(numbers_G, len(values_N)), values_N)


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss as a sum over responses, to be divided by the batch's denominator.

    `metrics` are sums over sampled tokens (detached 0-dim tensors), reported as means over the batch's sampled tokens.
    """

    loss: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """Advantages and loss; stateless, so that the order of accumulation has no effect."""

    @property
    def needs(self) -> Needs: ...

    def has_gradient(self, rollouts: Rollouts) -> bool:
        """Whether this group has any gradient; if not, no backward pass is run for it. Without `kl` and totals."""
        ...

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        """The advantages of a group's rollouts, float64 [G]; with `Needs.values` what they earn at their ends.

        Args:
            totals: those of the whole batch, for an algorithm that needs them; otherwise None.
        """
        ...

    def weights(self, rollouts: Rollouts) -> torch.Tensor:
        """What each rollout counts in loss and denominator, float64 [G]; 0 leaves it out."""
        ...

    def sums(self, rollouts: Rollouts) -> Totals:
        """What a group adds to the batch's totals; the same names for every group."""
        ...

    def denominator(self, totals: Totals) -> float:
        """What the batch's summed gradients are divided by; 0 if nothing counts, and then no gradient is taken."""
        ...

    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        """The loss of some responses, summed."""
        ...

    def num_corrected(self, gaps_N: torch.Tensor) -> int:
        """How many sampled tokens of a response an importance correction changed; recorded in the ledger.

        Args:
            gaps_N: the trainer's log-probs less the instance's, float64 on the host.
        """
        ...
