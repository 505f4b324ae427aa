"""GSPO: the ratio of a whole response, its length-normalised likelihood (arXiv 2507.18071, eq. 5-7).

    s_i = exp(1 / |o_i| sum_t log r_t),    every token of o_i: -min(s_i A, clip(s_i, 1 - clip_low, 1 + clip_high) A)

A branch of a rollout of several turns is a response of its own here; its tokens are those that it sampled.
"""

from collections.abc import Mapping

import torch

from async_rl.method.algorithms.base import Responses, Tokens
from async_rl.method.algorithms.log_ratio import exp
from async_rl.method.algorithms.policy_gradient import PolicyGradient, clipped_surrogate


class GSPO(PolicyGradient):
    CLIP = (3e-4, 4e-4)
    NORMALIZE = "sequence"

    def _surrogate(
        self, tokens: Tokens, advantages_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        log_ratio_G = responses.summed(tokens.logprobs_N - tokens.old_logprobs_N) / responses.lengths_G
        ratio_N = responses.per_token(exp(log_ratio_G), len(tokens))
        return clipped_surrogate(ratio_N, advantages_N, self.clip_low, self.clip_high)
