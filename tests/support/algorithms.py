"""Groups and tokens for algorithms, without a model."""

import random
from collections.abc import Sequence

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms import Algorithm, Responses, Rollouts, Tokens, make_algorithm

MAX_RESPONSE_TOKENS = 12


def algorithm_of(**settings: object) -> Algorithm:
    """The algorithm of these settings of `[algorithm]`, with responses of at most `MAX_RESPONSE_TOKENS`."""
    return make_algorithm(AlgorithmSection.model_validate(settings), MAX_RESPONSE_TOKENS)


def rollouts_of(rewards: Sequence[float], lengths: Sequence[int] = (), truncated: Sequence[bool] = ()) -> Rollouts:
    """A group's rollouts; by default of one token each, ended by themselves."""
    size = len(rewards)
    return Rollouts(
        rewards=tuple(rewards),
        lengths=tuple(lengths) or (1,) * size,
        truncated=tuple(truncated) or (False,) * size,
    )


def single_turns(
    advantages_G: torch.Tensor,
    lengths_G: torch.Tensor,
    groups: Sequence[int] = (),
    weights_G: torch.Tensor | None = None,
) -> Responses:
    """Responses that are whole rollouts; by default of one group."""
    return Responses(
        advantages_G,
        torch.ones_like(advantages_G) if weights_G is None else weights_G,
        lengths_G,
        lengths_G,
        torch.tensor(list(groups) or [0] * len(lengths_G)),
    )


def random_tokens(num_tokens: int, dtype: torch.dtype = torch.float64, spread: float = 0.4) -> Tokens:
    """Log-probs on fresh random numbers: those of the policy with a gradient, the others near them."""
    generator = torch.Generator().manual_seed(random.SystemRandom().randrange(2**31))

    def near(logprobs_N: torch.Tensor) -> torch.Tensor:
        return logprobs_N.detach() + spread * torch.randn(num_tokens, dtype=dtype, generator=generator)

    logprobs_N = (-2 * torch.rand(num_tokens, dtype=dtype, generator=generator)).requires_grad_()
    entropy_N = torch.rand(num_tokens, dtype=dtype, generator=generator).requires_grad_()
    others = (near(logprobs_N) for _ in range(4))
    return Tokens(logprobs_N, entropy_N, *others)
