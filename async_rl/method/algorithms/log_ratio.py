"""Ratios of probabilities and estimators of the KL divergence, from log-ratios that may be large.

Beyond a log-ratio of `MAX_LOG_RATIO`, exponentials continue along their tangent: float32's overflows at 88.7. Below it
they are exact; beyond it value and gradient stay finite and keep their direction. verl clamps the same log-ratios at
20, where the gradient then is 0 (`low_var_kl` and the policy loss in `verl/trainer/ppo/core_algos.py`); the tangent
still has a gradient against a log-ratio that large.

Shape legend: N sampled tokens.
"""

import math
from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""Nats. A ratio of exp(20) = 5e8 is not a meaningful estimate, and the square of a million tokens' sum of such
gradients, which the gradient norm takes in float32, is 2e29: far below its maximum of 3e38."""

KLEstimator = Literal["k1", "k2", "k3"]


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp, and beyond `MAX_LOG_RATIO` its tangent there."""
    beyond = log_ratio > MAX_LOG_RATIO
    # Clamped before, not after: the branch that is not selected has a gradient, too, and infinity times 0 is NaN.
    exact = torch.exp(log_ratio.clamp(max=MAX_LOG_RATIO))
    tangent = math.exp(MAX_LOG_RATIO) * (1 + log_ratio - MAX_LOG_RATIO)
    return torch.where(beyond, tangent, exact)


def kl_terms(logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Estimates of KL(policy || other), a term per token sampled from the policy, [N] (Schulman 2020).

    With d = other - logprob: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.

    Source: http://joschu.net/blog/kl-approx.html
    """
    d_N = other_logprobs_N - logprobs_N
    if estimator == "k1":
        return -d_N
    if estimator == "k2":
        return d_N.square() / 2
    return exp(d_N) - d_N - 1
