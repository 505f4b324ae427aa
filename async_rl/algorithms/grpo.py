"""GRPO: group-relative advantages, clipped ratio, k3 KL to the reference (DeepSeekMath, arXiv 2402.03300, eq. 3-4).

Per token t of response g, with ratio r = exp(logprob - old_logprob) and advantage A_g:

    l_t = -min(r A_g, clip(r, 1 - clip_low, 1 + clip_high) A_g) + kl_coef * k3_t
    k3_t = exp(ref - logprob) - (ref - logprob) - 1

`normalize = "sequence"` sums (1 / |o_g|) * sum_t l_t and counts responses, the paper's form; `"token"` sums l_t and
counts response tokens (DAPO, arXiv 2503.14476, eq. 8). Departure from the paper: the denominator is that of the whole
batch instead of one group; with `"sequence"` and equal group sizes the two are the same.

Shape legend: G responses of one group, N response tokens of the group.
"""

import torch

from async_rl.algorithms.base import LossSum
from async_rl.config import AlgorithmSection

STD_EPS = 1e-6


class GRPO:
    def __init__(self, config: AlgorithmSection) -> None:
        self._config = config

    @property
    def needs_reference(self) -> bool:
        return self._config.kl_coef > 0

    def advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """(r - mean) / (std + 1e-6), with the sample standard deviation; only the mean without `scale_by_std`."""
        centered_G = rewards_G - rewards_G.mean()
        if not self._config.scale_by_std or len(rewards_G) < 2:
            return centered_G
        return centered_G / (rewards_G.std() + STD_EPS)

    def loss_sum(
        self,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        ref_logprobs_N: torch.Tensor | None,
        advantages_G: torch.Tensor,
        lengths_G: torch.Tensor,
    ) -> LossSum:
        config = self._config
        advantages_N = advantages_G.repeat_interleave(lengths_G)
        ratio_N = torch.exp(logprobs_N - old_logprobs_N)
        clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        metrics = {"clip_fraction": (clipped_N != ratio_N).float().sum().detach()}
        if ref_logprobs_N is not None:
            log_ratio_N = ref_logprobs_N - logprobs_N
            kl_N = torch.exp(log_ratio_N) - log_ratio_N - 1
            loss_N = loss_N + config.kl_coef * kl_N
            metrics["kl"] = kl_N.sum().detach()
        if config.normalize == "sequence":
            weights_N = (1.0 / lengths_G.to(loss_N.dtype)).repeat_interleave(lengths_G)
            return LossSum((loss_N * weights_N).sum(), len(lengths_G), metrics)
        return LossSum(loss_N.sum(), len(loss_N), metrics)
