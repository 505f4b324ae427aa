"""The trainer's interface of an algorithm.

Shape legend: G rollouts of one group, or responses of a micro-batch; N sampled tokens of the responses, concatenated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Responses:
    """The G responses whose sampled tokens a loss is summed over; the tokens of a response are contiguous, in order.

    A rollout is one response, or several if it has branches; these need not be in one micro-batch.

    `advantages_G` are those of the rollouts, in the dtype of the log-probs. `lengths_G`, int64, are their sampled
    tokens, N in all; `rollout_lengths_G`, int64, those of each response's whole rollout. `num_rollouts` counts the
    rollouts to add to a denominator: over all micro-batches of a batch, each counts once.
    """

    advantages_G: torch.Tensor
    lengths_G: torch.Tensor
    rollout_lengths_G: torch.Tensor
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss as a sum over responses and the count it adds to the batch's denominator (invariant I4).

    The batch's loss is sum(loss) / sum(count), divided once when the whole batch is known. `metrics` are sums over
    sampled tokens (detached floats on the host or 0-dim tensors), reported as means over the batch's sampled tokens.
    """

    loss: torch.Tensor
    count: int
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """Advantages and loss; stateless, so that the order of accumulation has no effect."""

    @property
    def needs_reference(self) -> bool:
        """Whether `loss_sum` reads `ref_logprobs_N`; otherwise the trainer keeps no reference model."""
        ...

    def has_gradient(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these rewards has any gradient; if not, no backward pass is run for it."""
        ...

    def advantages(self, rewards: Sequence[float]) -> torch.Tensor:
        """Rewards of one group's rollouts, all finite -> their advantages, float64 [G]."""
        ...

    def loss_sum(
        self,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        ref_logprobs_N: torch.Tensor | None,
        responses: Responses,
    ) -> LossSum:
        """The loss of some responses, summed.

        Args:
            logprobs_N: policy log-probs of the sampled tokens, float32 [N], with gradient.
            old_logprobs_N: log-probs under the policy that sampled, float32 [N], no gradient.
            ref_logprobs_N: log-probs under the reference, float32 [N], or None where `needs_reference` is False.
            responses: whose tokens these are.
        """
        ...
