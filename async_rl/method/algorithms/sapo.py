"""SAPO: a smooth gate instead of a clip (arXiv 2511.20347, eq. 6).

    s = -4 / tau * sigmoid(tau (r - 1)) A,    tau = tau_positive where A > 0, tau_negative elsewhere

At r = 1 its gradient is that of r A. As in the paper and in verl's and TRL's `sapo` each response has the same weight
(`normalize = "sequence"`).
"""

from collections.abc import Mapping

import torch

from async_rl.config.algorithm_traits import TRAITS, SAPOOptions
from async_rl.method.algorithms.base import Responses, Tokens
from async_rl.method.algorithms.log_ratio import exp
from async_rl.method.algorithms.policy_gradient import PolicyGradient


class SAPO(PolicyGradient):
    NORMALIZE = "sequence"
    UNUSED = TRAITS["sapo"].unused
    Options = SAPOOptions
    options: SAPOOptions

    def _surrogate(
        self, tokens: Tokens, advantages_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        ratio_N = exp(tokens.logprobs_N - tokens.old_logprobs_N)
        # `torch.where` of two numbers would be float32, whatever the log-probs are.
        positive, negative = ratio_N.new_tensor([self.options.tau_positive, self.options.tau_negative])
        tau_N = torch.where(advantages_N > 0, positive, negative)
        return -torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N * advantages_N, {}
