"""PPO with a critic (Schulman et al. 2017, arXiv 1707.06347; for language models Ouyang et al. 2022, arXiv 2203.02155).

    s(r, A) = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

with advantages of tokens that a critic's values give (`gae.py`). The critic trains on each
micro-batch right before the policy does. With one step per batch its values, detached, are the old ones too, as the
policy's log-probs are with `old_policy = "reuse"`; with several, the old values are those of a model with the critic's
weights at the batch's start. Departures: advantages are not whitened over the batch, which cannot be streamed; the
losses are means over the whole mini-batch's tokens.
"""

from dataclasses import replace

import torch

from async_rl.config.algorithm_traits import TRAITS, CriticOptions
from async_rl.method.algorithms.base import Needs, Rollouts, Totals
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class PPO(PolicyGradient):
    SCALES_BY_STD = False
    Options = CriticOptions
    UNUSED = TRAITS["ppo"].unused

    @property
    def needs(self) -> Needs:
        """A KL in the reward is one of each token's, and none of the rollout's."""
        return replace(super().needs, values=True, reward_kl=False)

    def has_gradient(self, rollouts: Rollouts) -> bool:
        return True

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        """The shaped rewards."""
        return torch.tensor(self.shaped_rewards(rollouts), dtype=torch.float64)
