"""REINFORCE++ with a baseline: centred in the group, whitened over the batch's tokens (arXiv 2501.03262, eq. 7-8).

    a_g = R_g - mean(R of the group),    A_g = (a_g - mean) / sqrt(var + 1e-8)

with mean and variance over the sampled tokens of the batch, each with its rollout's a_g. Whitening with the batch's
mean changes the sign of advantages, and so what is clipped: it cannot be deferred to the end of a stream, and needs
`train.mode = "synchronous"`.
"""

import math
from dataclasses import replace

import torch

from async_rl.config.algorithm_traits import TRAITS
from async_rl.method.algorithms.base import Needs, Rollouts, Totals
from async_rl.method.algorithms.policy_gradient import PolicyGradient

VARIANCE_EPS = 1e-8


class ReinforcePPBaseline(PolicyGradient):
    SCALES_BY_STD = False
    UNUSED = TRAITS["reinforce_pp_baseline"].unused

    @property
    def needs(self) -> Needs:
        return replace(super().needs, totals=True)

    def has_gradient(self, rollouts: Rollouts) -> bool:
        """Also a group of equal rewards: whitening moves its advantages away from 0."""
        return True

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        assert totals is not None, "the algorithm needs them"
        centered_G = super().advantages(rollouts, None)
        # Where no token counts, none has a gradient.
        count = totals["weighted_tokens"] or 1.0
        mean = totals["advantages"] / count
        variance = max(totals["advantage_squares"] / count - mean**2, 0.0) * count / max(count - 1, 1)
        return (centered_G - mean) / math.sqrt(variance + VARIANCE_EPS)

    def sums(self, rollouts: Rollouts) -> Totals:
        centered_G = super().advantages(rollouts, None)
        tokens_G = self.weights(rollouts) * torch.tensor(rollouts.lengths, dtype=torch.float64)
        squares = float(tokens_G @ centered_G.square())
        return {
            **super().sums(rollouts),
            "advantages": float(tokens_G @ centered_G),
            "advantage_squares": squares,
        }
