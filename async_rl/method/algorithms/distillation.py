"""On-policy distillation: the reverse KL to a teacher is the only advantage (Agarwal et al. 2023, arXiv 2306.13649;
Thinking Machines, "On-policy distillation", 2025).

    A_t = -teacher_coef sg(log pi(t) - log pi_teacher(t))

The reward is recorded and not trained. With any other algorithm `algorithm.teacher` adds the same to its advantages.
"""

import torch

from async_rl.config.algorithm_traits import TRAITS
from async_rl.method.algorithms.base import Rollouts, Totals
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class Distillation(PolicyGradient):
    SCALES_BY_STD = False
    UNUSED = TRAITS["distillation"].unused

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        return torch.zeros(len(rollouts.rewards), dtype=torch.float64)
