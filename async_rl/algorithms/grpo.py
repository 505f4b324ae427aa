"""GRPO: group-relative advantages, clipped ratio, k3 KL to the reference (DeepSeekMath, arXiv 2402.03300, eq. 3-4).

Per sampled token t of rollout g, with ratio r = exp(logprob - old_logprob) and advantage A_g:

    l_t = -min(r A_g, clip(r, 1 - clip_low, 1 + clip_high) A_g) + kl_coef * k3_t
    k3_t = exp(ref - logprob) - (ref - logprob) - 1

`normalize = "sequence"` sums (1 / |o_g|) * sum_t l_t and counts rollouts, the paper's form; `"token"` sums l_t and
counts sampled tokens (DAPO, arXiv 2503.14476, eq. 8). A rollout of several turns is one o_g: all tokens that it
sampled, however many responses of the trainer they are in, and none that it observed. Departure from the paper: the
denominator is that of the whole batch instead of one group; with `"sequence"` and equal group sizes the two are the
same.

Second departure: beyond a log-ratio of 20, r and k3 continue along their tangent instead of as an exponential, which
overflows float32 at 88.7. Below it they are exactly the formulas above; beyond it value and gradient stay finite and
keep their direction. verl clamps the same log-ratios at 20, where the gradient then is 0 (`low_var_kl` and the policy
loss in `verl/trainer/ppo/core_algos.py`); the tangent still has a gradient against a log-ratio that large.

Shape legend: G rollouts of one group, or responses of a micro-batch; N sampled tokens of the responses.
"""

import math
from collections.abc import Sequence

import torch

from async_rl.algorithms.base import LossSum, Responses
from async_rl.config.sections import AlgorithmSection

STD_EPS = 1e-6

MAX_LOG_RATIO = 20.0
"""Nats. A ratio of exp(20) = 5e8 is not a meaningful estimate, and the square of a million tokens' sum of such
gradients, which the gradient norm takes in float32, is 2e29: far below its maximum of 3e38."""


class GRPO:
    def __init__(self, config: AlgorithmSection) -> None:
        self._config = config

    @property
    def needs_reference(self) -> bool:
        return self._config.kl_coef > 0

    def has_gradient(self, rewards: Sequence[float]) -> bool:
        """Only the KL to a reference gives a gradient to a group whose rewards are all equal."""
        return self.needs_reference or min(rewards) != max(rewards)

    def advantages(self, rewards: Sequence[float]) -> torch.Tensor:
        """(r - mean) / (std + 1e-6), with the sample standard deviation; only r - mean without `scale_by_std`.

        Exactly 0 if all rewards are equal: the rounded mean of equal numbers may differ from them, and a difference of
        one sign for the whole group, divided by only 1e-6, is not small.
        """
        rewards_G = torch.tensor(rewards, dtype=torch.float64)
        if min(rewards) == max(rewards):
            return torch.zeros_like(rewards_G)
        centered_G = rewards_G - rewards_G.mean()
        return centered_G / (rewards_G.std() + STD_EPS) if self._config.scale_by_std else centered_G

    def loss_sum(
        self,
        logprobs_N: torch.Tensor,
        old_logprobs_N: torch.Tensor,
        ref_logprobs_N: torch.Tensor | None,
        responses: Responses,
    ) -> LossSum:
        config, lengths_G = self._config, responses.lengths_G
        # With its size given, the host need not wait for the device to sum the lengths.
        num_tokens = len(logprobs_N)
        advantages_N = responses.advantages_G.repeat_interleave(lengths_G, output_size=num_tokens)
        ratio_N = _exp(logprobs_N - old_logprobs_N)
        clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
        loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        metrics = {"clip_fraction": (clipped_N != ratio_N).float().sum().detach()}
        if ref_logprobs_N is not None:
            log_ratio_N = ref_logprobs_N - logprobs_N
            kl_N = _exp(log_ratio_N) - log_ratio_N - 1
            loss_N = loss_N + config.kl_coef * kl_N
            metrics["kl"] = kl_N.sum().detach()
        if config.normalize == "sequence":
            weights_G = 1.0 / responses.rollout_lengths_G.to(loss_N.dtype)
            weights_N = weights_G.repeat_interleave(lengths_G, output_size=num_tokens)
            return LossSum((loss_N * weights_N).sum(), responses.num_rollouts, metrics)
        return LossSum(loss_N.sum(), len(loss_N), metrics)


def _exp(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """exp, and beyond `MAX_LOG_RATIO` its tangent there."""
    beyond_N = log_ratio_N > MAX_LOG_RATIO
    # Clamped before, not after: the branch that is not selected has a gradient, too, and infinity times 0 is NaN.
    exact_N = torch.exp(log_ratio_N.clamp(max=MAX_LOG_RATIO))
    tangent_N = math.exp(MAX_LOG_RATIO) * (1 + log_ratio_N - MAX_LOG_RATIO)
    return torch.where(beyond_N, tangent_N, exact_N)
