"""DPPO: a trust region in probabilities instead of ratios (arXiv 2602.04879, the total-variation mask).

    s = -r A, and 0 for a token with A > 0 and pi - pi_old > delta, or A < 0 and pi - pi_old < -delta

Rare tokens, whose ratio is far from 1 for small changes of the policy, keep their gradient. In the paper pi_old are the
log-probs that the instances reported: `old_policy = "rollout"`.
"""

from collections.abc import Mapping

import torch

from async_rl.config.algorithm_traits import TRAITS, DPPOOptions
from async_rl.method.algorithms.base import Responses, Tokens
from async_rl.method.algorithms.log_ratio import exp
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class DPPO(PolicyGradient):
    UNUSED = TRAITS["dppo"].unused
    Options = DPPOOptions
    options: DPPOOptions

    def _surrogate(
        self, tokens: Tokens, advantages_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        moved_N = (tokens.logprobs_N.detach().exp() - tokens.old_logprobs_N.exp()) * advantages_N.sign()
        keeps_N = moved_N <= self.options.delta
        ratio_N = exp(tokens.logprobs_N - tokens.old_logprobs_N)
        return -ratio_N * advantages_N * keeps_N, {"clip_fraction": (~keeps_N).float().sum()}
