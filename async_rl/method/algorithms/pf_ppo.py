"""PF-PPO: rollouts with an extreme reward count more (arXiv 2409.06957).

    w_g = |R_g|^power

The paper draws the batch again with probabilities proportional to a power of |R|; here each rollout has that weight in
the sum and in the denominator, which is the expectation of it, without the noise of drawing. `power` is 2 by default.
"""

import torch

from async_rl.config.algorithm_traits import PFPPOOptions
from async_rl.errors import RewardError
from async_rl.method.algorithms.base import Rollouts
from async_rl.method.algorithms.policy_gradient import PolicyGradient

SMALLEST_WEIGHT, MAX_WEIGHT = 1e-15, 1e15
"""Of a rollout; weights times gradients are summed in float32. Smaller ones count as 0."""


class PFPPO(PolicyGradient):
    Options = PFPPOOptions
    options: PFPPOOptions

    def weights(self, rollouts: Rollouts) -> torch.Tensor:
        """
        Raises:
            RewardError: a weight is too large for float32.
        """
        rewards_G = torch.tensor(self.shaped_rewards(rollouts), dtype=torch.float64)
        weights_G = rewards_G.abs() ** self.options.power
        if weights_G.max() > MAX_WEIGHT:
            raise RewardError(
                f"algorithm.name = 'pf_ppo' weighs a rollout by |reward| ** {self.options.power:g}, but a reward is "
                f"{float(rewards_G[weights_G.argmax()]):g}: expected a weight of at most {MAX_WEIGHT:g}; scale the "
                "reward"
            )
        return super().weights(rollouts) * torch.where(weights_G < SMALLEST_WEIGHT, 0.0, weights_G)
