"""The trainer's interface of an algorithm.

Shape legend: G responses of one group, N response tokens of one group (all its responses, concatenated).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss as a sum over a group and the count it adds to the batch's denominator (invariant I4).

    The batch's loss is sum(loss) / sum(count), divided once when the whole batch is known. `metrics` are sums over
    response tokens (detached floats on the host or 0-dim tensors), reported as means over the batch's response tokens.
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
        """Rewards of one group, all finite -> advantages, float64 [G]."""
        ...

    def loss_sum(
        self,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        ref_logprobs_N: torch.Tensor | None,
        advantages_G: torch.Tensor,
        lengths_G: torch.Tensor,
    ) -> LossSum:
        """The group's loss, summed.

        Args:
            logprobs_N: policy log-probs of the response tokens, float32 [N], with gradient.
            old_logprobs_N: log-probs under the policy that sampled, float32 [N], no gradient.
            ref_logprobs_N: log-probs under the reference, float32 [N], or None where `needs_reference` is False.
            advantages_G: [G], in the dtype of the log-probs.
            lengths_G: response lengths, int64 [G], summing to N; tokens of response g are contiguous, in order.
        """
        ...
