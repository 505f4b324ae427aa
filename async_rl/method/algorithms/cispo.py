"""CISPO: the clipped ratio is a weight, and no token loses its gradient (arXiv 2506.13585, eq. 4-5).

    s = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi

As in the paper there is no lower clip by default (`clip_low = 1`); the upper one is TRL's 5.0 (`clip_high = 4`).
"""

from collections.abc import Mapping

import torch

from async_rl.method.algorithms.base import Responses, Tokens
from async_rl.method.algorithms.log_ratio import exp
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class CISPO(PolicyGradient):
    CLIP = (1.0, 4.0)

    def _surrogate(
        self, tokens: Tokens, advantages_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        ratio_N = exp((tokens.logprobs_N - tokens.old_logprobs_N).detach())
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss_N = -clipped_N * advantages_N * tokens.logprobs_N
        return loss_N, {"clip_fraction": ((clipped_N != ratio_N) & (advantages_N != 0)).float().sum()}
