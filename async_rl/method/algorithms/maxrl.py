"""MaxRL: advantages relative to the pass rate, a step towards maximum likelihood (arXiv 2602.02710).

    A_g = (R_g - mean(R)) / mean(R)

Rewards are at least 0, as in the paper, where they are 0 or 1.
"""

import torch

from async_rl.config.algorithm_traits import TRAITS
from async_rl.errors import RewardError
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class MaxRL(PolicyGradient):
    SCALES_BY_STD = False
    UNUSED = TRAITS["maxrl"].unused

    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """
        Raises:
            RewardError: a reward is negative.
        """
        if rewards_G.min() < 0:
            raise RewardError(
                f"algorithm.name = 'maxrl' divides by a group's mean reward, but a reward is {float(rewards_G.min())}: "
                "expected 0 or more; shift the reward, or choose another algorithm"
            )
        # Relative to the largest one, since a mean of the smallest numbers would be rounded to 0.
        shares_G = rewards_G / rewards_G.max()
        return super()._advantages(shares_G) / shares_G.mean()
