"""What most algorithms have in common: group-relative advantages times a surrogate per token, and what users add to it.

    L = 1/D sum_g w_g c_g sum_t [ u_t s(r_t, A_g) + kl_coef KL_t - entropy_coef H_t ],    r = exp(logprob - old_logprob)

with s the algorithm's surrogate, u_t an importance weight (`importance.py`), w_g the rollout's weight and

    normalize    c_g         D
    token        1           sum_g w_g |o_g|
    sequence     1 / |o_g|   sum_g w_g
    constant     1           sum_g w_g * rollout.max_response_tokens

|o_g| are all tokens that rollout g sampled, however many responses of the trainer they are in. D is that of the whole
batch, not of a group. With `scale_by_std = "batch"` advantages are divided by the standard deviation of the batch's
rewards, which is one factor of D: exact in a stream, also where the surrogate clips, since a clip depends on the
advantage's sign only.

An algorithm is a class of this with its own `_advantages` and `_surrogate`, in a file of its own. Settings that have no
effect on it are `UNUSED`, and refused.

Shape legend: G rollouts of one group, or responses of a micro-batch; N sampled tokens of the responses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from async_rl.config.algorithm_section import AlgorithmSection, Normalize
from async_rl.config.section import NoOptions, Section, read_options
from async_rl.method.algorithms.base import LossSum, Needs, Responses, Rollouts, Tokens, Totals
from async_rl.method.algorithms.importance import ImportanceWeights
from async_rl.method.algorithms.log_ratio import exp, kl_terms

STD_EPS = 1e-6


class PolicyGradient:
    """Implements `Algorithm`; by itself it is GRPO's advantages with PPO's clipped surrogate."""

    CLIP: ClassVar[tuple[float, float]] = (0.2, 0.2)
    NORMALIZE: ClassVar[Normalize] = "token"
    SCALES_BY_STD: ClassVar[bool | Literal["batch"]] = True
    UNUSED: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Section]] = NoOptions

    def __init__(self, config: AlgorithmSection, max_response_tokens: int) -> None:
        """
        Args:
            max_response_tokens: of a rollout, `rollout.max_response_tokens`.

        Raises:
            ConfigError: `algorithm.options` are not those of the algorithm, or a setting has no effect on it.
        """
        config.refuse_unused(self.UNUSED)
        self.config = config
        self.max_response_tokens = max_response_tokens
        self.options = read_options("algorithm", config.name, config.options, self.Options)
        low, high = self.CLIP
        self.clip_low = low if config.clip_low is None else config.clip_low
        self.clip_high = high if config.clip_high is None else config.clip_high
        self.normalize = config.normalize or self.NORMALIZE
        self.scale_by_std = self.SCALES_BY_STD if config.scale_by_std is None else config.scale_by_std
        self.importance = (
            None
            if config.importance == "none"
            else ImportanceWeights(config.importance, 1 / config.importance_high, config.importance_high)
        )

    @property
    def needs(self) -> Needs:
        config = self.config
        adds_terms = config.entropy_coef > 0 or (config.kl_coef > 0 and config.kl_in == "loss")
        return Needs(
            reference=config.kl_coef > 0,
            teacher=config.teacher is not None,
            rollout=self.importance is not None,
            reward_kl=config.kl_coef > 0 and config.kl_in == "reward",
            # The deviation divides the surrogate only: a sum that holds other terms cannot be divided by it later.
            totals=self.scale_by_std == "batch" and (adds_terms or config.teacher is not None),
        )

    def has_gradient(self, rollouts: Rollouts) -> bool:
        config = self.config
        if config.kl_coef > 0 or config.entropy_coef > 0 or config.teacher is not None:
            return True
        if not any(self.weights(rollouts).tolist()):
            return False
        rewards = self.shaped_rewards(rollouts)
        return min(rewards) != max(rewards)

    def advantages(self, rollouts: Rollouts, totals: Totals | None) -> torch.Tensor:
        """`_advantages` of the shaped rewards; exactly 0 if these are equal, since their rounded mean may differ."""
        rewards_G = torch.tensor(self.shaped_rewards(rollouts), dtype=torch.float64)
        if rewards_G.min() == rewards_G.max():
            return torch.zeros_like(rewards_G)
        advantages_G = self._advantages(rewards_G)
        if totals is not None and self.scale_by_std == "batch":
            return advantages_G / deviation(totals)
        return advantages_G

    def shaped_rewards(self, rollouts: Rollouts) -> tuple[float, ...]:
        """The rewards with `shaping`."""
        return tuple(reward + own for reward, own in zip(rollouts.rewards, self.shaping(rollouts), strict=True))

    def shaping(self, rollouts: Rollouts) -> tuple[float, ...]:
        """What an over-long rollout and a KL in the reward cost, at most 0 for the former.

        Over-long shaping (DAPO, arXiv 2503.14476, eq. 13): with the limit L and `overlong_tokens` C, a rollout of n
        tokens loses clamp((n - (L - C)) / C, 0, 1).
        """
        config, added = self.config, [0.0] * len(rollouts.rewards)
        if config.overlong_tokens is not None:
            free = self.max_response_tokens - config.overlong_tokens
            for i, length in enumerate(rollouts.lengths):
                added[i] -= min(max((length - free) / config.overlong_tokens, 0.0), 1.0)
        if rollouts.kl is not None and config.kl_in == "reward":
            added = [own - config.kl_coef * kl for own, kl in zip(added, rollouts.kl, strict=True)]
        return tuple(added)

    def weights(self, rollouts: Rollouts) -> torch.Tensor:
        """1, or what a node of the pipeline says; 0 for a rollout that a limit ended, with `mask_truncated`."""
        weights_G = torch.tensor(rollouts.weights or [1.0] * len(rollouts.rewards), dtype=torch.float64)
        if not self.config.mask_truncated:
            return weights_G
        return weights_G * torch.tensor([float(not truncated) for truncated in rollouts.truncated])

    def sums(self, rollouts: Rollouts) -> Totals:
        weights_G = self.weights(rollouts)
        found = {
            "weights": float(weights_G.sum()),
            "weighted_tokens": float(weights_G @ torch.tensor(rollouts.lengths, dtype=torch.float64)),
        }
        if self.scale_by_std == "batch":
            values = self._batch_scaled(rollouts)
            found |= {"rollouts": len(values), "values": math.fsum(values)}
            found["squares"] = math.fsum(value**2 for value in values)
        return found

    def denominator(self, totals: Totals) -> float:
        if self.normalize == "token":
            found = totals["weighted_tokens"]
        else:
            found = totals["weights"] * (self.max_response_tokens if self.normalize == "constant" else 1)
        return found * deviation(totals) if self.scale_by_std == "batch" and not self.needs.totals else found

    def loss_sum(self, tokens: Tokens, responses: Responses) -> LossSum:
        config, num_tokens = self.config, len(tokens)
        advantages_N = tokens.advantages_N
        if advantages_N is None:
            advantages_N = responses.per_token(responses.advantages_G, num_tokens)
        if tokens.rewards_N is not None:
            advantages_N = advantages_N + tokens.rewards_N
        metrics: dict[str, torch.Tensor] = {}
        if tokens.teacher_logprobs_N is not None:
            # Thinking Machines, "On-policy distillation" (2025): the reverse KL to the teacher as a token's reward.
            distance_N = (tokens.logprobs_N - tokens.teacher_logprobs_N).detach()
            advantages_N = advantages_N - config.teacher_coef * distance_N
            metrics["teacher_kl"] = distance_N.sum()
        loss_N, of_surrogate = self._surrogate(tokens, advantages_N, responses)
        metrics |= of_surrogate
        if self.importance is not None:
            assert tokens.rollout_logprobs_N is not None, "the algorithm needs them"
            gaps_N = (tokens.old_logprobs_N - tokens.rollout_logprobs_N).detach()
            weights_N, changed_N = self.importance.of(gaps_N, responses)
            loss_N = loss_N * weights_N
            metrics["corrected"] = changed_N.sum()
        if tokens.ref_logprobs_N is not None:
            kl_N = kl_terms(tokens.logprobs_N, tokens.ref_logprobs_N, config.kl_estimator)
            if config.kl_in == "loss":
                loss_N = loss_N + config.kl_coef * kl_N
            metrics["kl"] = kl_N.sum().detach()
        if config.entropy_coef > 0:
            loss_N = loss_N - config.entropy_coef * tokens.entropy_N
        if tokens.weights_N is not None:
            loss_N = loss_N * tokens.weights_N
        weights_G = responses.weights_G
        if self.normalize == "sequence":
            weights_G = weights_G / responses.rollout_lengths_G.to(loss_N.dtype)
        return LossSum((loss_N * responses.per_token(weights_G, num_tokens)).sum(), metrics)

    def num_corrected(self, gaps_N: torch.Tensor) -> int:
        return 0 if self.importance is None else self.importance.num_changed(gaps_N)

    def _advantages(self, rewards_G: torch.Tensor) -> torch.Tensor:
        """Shaped rewards of one group, float64, not all equal -> advantages, float64 [G]."""
        centered_G = rewards_G - rewards_G.mean()
        return centered_G / (rewards_G.std() + STD_EPS) if self.scale_by_std is True else centered_G

    def _batch_scaled(self, rollouts: Rollouts) -> Sequence[float]:
        """What has the deviation that divides advantages with `scale_by_std = "batch"`, a number per rollout."""
        return self.shaped_rewards(rollouts)

    def _surrogate(
        self, tokens: Tokens, advantages_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The loss of each token, [N], and metrics: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) here."""
        return clipped_surrogate(
            exp(tokens.logprobs_N - tokens.old_logprobs_N), advantages_N, self.clip_low, self.clip_high
        )


def clipped_surrogate(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [N], and for how many tokens the clip decides."""
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return -torch.minimum(free_N, clipped_N), {"clip_fraction": (clipped_N < free_N).float().sum().detach()}


def deviation(totals: Totals) -> float:
    """Of the batch's rewards (`_batch_scaled`), with one degree of freedom less, plus 1e-6.

    From exact sums, which groups can be added to in any order: it is exact to 2e-4 of itself as long as the mean is
    below a million deviations.
    """
    count = totals["rollouts"]
    squares = totals["squares"] - totals["values"] ** 2 / count
    return math.sqrt(max(squares, 0.0) / max(count - 1, 1)) + STD_EPS
