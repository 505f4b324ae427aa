"""RLOO: each rollout's baseline is the mean of the others (arXiv 2402.14740, section 3.2).

    A_g = R_g - mean of R without R_g = G / (G - 1) (R_g - mean(R))

Departure: the loss is PPO's clipped one per token, as verl has it, where the paper sums log-probs over a rollout: with
one step per batch both gradients are the same up to what they are divided by (`normalize`).
"""

import torch

from async_rl.method.algorithms.policy_gradient import PolicyGradient


class RLOO(PolicyGradient):
    SCALES_BY_STD = False

    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        return super()._advantages(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))
