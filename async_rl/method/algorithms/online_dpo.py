"""Online DPO: the best and the worst rollout of a group are a preference pair (arXiv 2402.04792, eq. 2).

    L = -1 / pairs sum over groups log sigmoid(beta (d_best - d_worst)),    d_g = sum_t (log pi - log pi_ref)

Of several best or worst rollouts the first is taken; a group of equal rewards has no pair. The pair's gradient depends
on both of its rollouts, so a group must fit into one micro-batch.
"""

import torch
import torch.nn.functional as F

from async_rl.config.algorithm_traits import TRAITS, OnlineDPOOptions
from async_rl.errors import NodeFailed
from async_rl.method.algorithms.base import LossSum, Needs, Responses, Rollouts, Tokens, Totals
from async_rl.method.algorithms.log_ratio import kl_terms
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class OnlineDPO(PolicyGradient):
    """Only the shaping of rewards and the masking of rollouts are `PolicyGradient`'s."""

    UNUSED = TRAITS["online_dpo"].unused
    Options = OnlineDPOOptions
    options: OnlineDPOOptions

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, whole_groups=True)

    def has_gradient(self, rollouts: Rollouts) -> bool:
        return bool(self.advantages(rollouts, None).any())

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        """1 for the best rollout, -1 for the worst, 0 for the others."""
        signs_G = torch.zeros(len(rollouts.rewards), dtype=torch.float64)
        counted = self.weights(rollouts).tolist()
        if parts := [weight for weight in counted if weight not in (0.0, 1.0)]:
            raise NodeFailed(
                f"pipeline.nodes write the weight {parts[0]:g} of a rollout, but algorithm.name = 'online_dpo' takes "
                "whole rollouts: expected 0 or 1"
            )
        rewards = {i: reward for i, reward in enumerate(self.shaped_rewards(rollouts)) if counted[i]}
        if rewards and min(rewards.values()) != max(rewards.values()):
            signs_G[max(rewards, key=lambda i: rewards[i])] = 1.0
            signs_G[min(rewards, key=lambda i: rewards[i])] = -1.0
        return signs_G

    def sums(self, rollouts: Rollouts) -> Totals:
        return {"pairs": float(self.has_gradient(rollouts))}

    def denominator(self, totals: Totals) -> float:
        return totals["pairs"]

    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        assert tokens.ref_logprobs_N is not None, "the algorithm needs them"
        signs_G, num_responses = responses.advantages_G, len(responses.lengths_G)
        distances_G = responses.summed(tokens.logprobs_N - tokens.ref_logprobs_N)
        # One place for each group; there are no more groups than responses.
        margins = distances_G.new_zeros(num_responses).index_add(0, responses.groups_G, signs_G * distances_G)
        is_pair = distances_G.new_zeros(num_responses).index_add(0, responses.groups_G, signs_G.abs()) > 0
        losses = -F.logsigmoid(self.options.beta * margins)
        kl_N = kl_terms(tokens.logprobs_N, tokens.ref_logprobs_N, self.config.kl_estimator)
        return LossSum(torch.where(is_pair, losses, 0.0).sum(), {"kl": kl_N.sum().detach()})
