"""Advantages of tokens from a critic's values (GAE, Schulman et al. 2015, arXiv 1506.02438), and the critic's loss.

Over the sampled tokens t of one response, whose last one is T:

    r_t = -kl_coef KL_t + [t = T] R,    delta_t = r_t + gamma V_{t+1} - V_t,    V_{T+1} = 0
    A_t = sum_{k >= t} (gamma lambda)^{k-t} delta_k,    G_t = A_t + V_t
    L_V = 1/2 max((V_t - G_t)^2, (clip(V_t, V_old,t - value_clip, V_old,t + value_clip) - G_t)^2)

R is the rollout's reward; KL_t, of `algorithm.kl_in = "reward"`, is of the log-probs that the instances reported, since
these are of the weights that sampled. Observed tokens are skipped: the value that follows a turn's last token is that
of the next turn's first. A rollout that a limit ended is not continued in thought: its reward is what it got, and no
value is put at its end. A rollout with branches earns its reward at the end of each of its responses, as each is a
course of its own, and each token is in the loss once.

All of it is of one response, so it does not depend on the rest of a batch: verl and OpenRLHF also whiten advantages
over the whole batch, which cannot be streamed and is left out.

Shape legend: G responses of a micro-batch; N sampled tokens of them.
"""

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms.base import Responses
from async_rl.method.algorithms.log_ratio import kl_terms


class AdvantageEstimation:
    """GAE and value loss under the settings of a run."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._critic = algorithm.critic
        self._algorithm = algorithm

    def rewards(
        self, responses: Responses, logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor | None
    ) -> torch.Tensor:
        """The reward of each token, [N].

        Args:
            responses: whose `advantages_G` are the rewards of rollouts (`Algorithm.advantages`).
            logprobs_N: of the tokens as they were sampled.
            ref_logprobs_N: under the reference, if there is one.
        """
        config, num_tokens = self._algorithm, len(logprobs_N)
        is_last_N = _num_following(responses, num_tokens) == 0
        rewards_N = responses.per_token(responses.advantages_G, num_tokens) * is_last_N
        if ref_logprobs_N is not None and config.kl_in == "reward":
            kl_N = kl_terms(logprobs_N, ref_logprobs_N, config.kl_estimator)
            rewards_N = rewards_N - config.kl_coef * kl_N
        return rewards_N

    def of(
        self, rewards_N: torch.Tensor, values_N: torch.Tensor, responses: Responses
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(advantages, returns), [N] each, from rewards and values without gradients."""
        gamma, num_following_N = self._critic.gamma, _num_following(responses, len(values_N))
        deltas_N = rewards_N + gamma * _later(values_N, 1, num_following_N) - values_N
        advantages_N = _discounted_sums(deltas_N, gamma * self._critic.gae_lambda, num_following_N)
        return advantages_N, advantages_N + values_N

    def value_loss(self, values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor) -> torch.Tensor:
        """The loss of each token, [N]; only `values_N` have a gradient."""
        loss_N = (values_N - returns_N).square()
        if clip := self._critic.value_clip:
            clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
            loss_N = torch.maximum(loss_N, (clipped_N - returns_N).square())
        return loss_N / 2


def _num_following(responses: Responses, num_tokens: int) -> torch.Tensor:
    """How many sampled tokens of its response follow each token, int64 [N]."""
    ends_N = responses.per_token(responses.lengths_G.cumsum(0), num_tokens)
    return ends_N - 1 - torch.arange(num_tokens, device=ends_N.device)


def _later(values_N: torch.Tensor, num_tokens: int, num_following_N: torch.Tensor) -> torch.Tensor:
    """The value so many tokens later in the same response, 0 beyond its end."""
    return values_N.roll(-num_tokens).masked_fill(num_following_N < num_tokens, 0.0)


def _discounted_sums(terms_N: torch.Tensor, factor: float, num_following_N: torch.Tensor) -> torch.Tensor:
    """sum_{k >= t} factor^(k-t) terms_k over a response, in log2(N) operations on all tokens at once.

    After a round with `reach` each sum has the terms of its next `reach` tokens; the next one adds those of as many
    tokens more. What a sum is made of does not depend on the responses beside it.
    """
    sums_N, reach = terms_N, 1
    while reach < len(terms_N):
        sums_N = sums_N + factor**reach * _later(sums_N, reach, num_following_N)
        reach *= 2
    return sums_N
