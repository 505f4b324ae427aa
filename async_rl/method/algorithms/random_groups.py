"""Random groups with log-probs, without a model, for checks of algorithms (`checking.py`).

Shape legend: N sampled tokens of one response.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from async_rl.method.algorithms.base import Needs, Rollouts, Tokens

NUM_GROUPS = 5

Draw = Callable[[random.Random], float]


def any_reward(rng: random.Random) -> float:
    return rng.uniform(0.0, 2.0)


@dataclass(frozen=True, slots=True)
class RandomGroup:
    """A group's rollouts, and per response the number of its rollout and its log-probs, leaves with a gradient."""

    rollouts: Rollouts
    responses: tuple[tuple[int, Tokens], ...]

    def to(self, dtype: torch.dtype) -> "RandomGroup":
        """The same numbers, in new leaves."""

        def converted(values_N: torch.Tensor | None) -> torch.Tensor | None:
            return None if values_N is None else values_N.detach().to(dtype).requires_grad_(values_N.requires_grad)

        def of(tokens: Tokens) -> Tokens:
            return tokens_of(lambda name: converted(getattr(tokens, name)))

        return replace(self, responses=tuple((rollout, of(tokens)) for rollout, tokens in self.responses))


def random_batch(
    rng: random.Random,
    needs: Needs,
    draw: Draw = any_reward,
    *,
    max_response_tokens: int,
    parts: Sequence[str] = (),
) -> list[RandomGroup]:
    """Groups of several sizes, with branches, truncated rollouts, and one of equal rewards."""
    groups = [_random_group(rng, needs, draw, max_response_tokens, parts) for _ in range(NUM_GROUPS)]
    equal = groups[-1].rollouts
    same = {name: (values[0],) * len(values) for name, values in equal.parts.items()}
    rewards = (equal.rewards[0],) * len(equal.rewards)
    return [*groups[:-1], replace(groups[-1], rollouts=replace(equal, rewards=rewards, parts=same))]


def tokens_of(values: Callable[[str], torch.Tensor | None]) -> Tokens:
    """Tokens with the given values of each field."""
    made: dict[str, Any] = {field.name: values(field.name) for field in fields(Tokens)}
    return Tokens(**made)


def _random_group(
    rng: random.Random, needs: Needs, draw: Draw, max_response_tokens: int, parts: Sequence[str]
) -> RandomGroup:
    size = rng.randint(2, 5)
    lengths = [
        [rng.randint(1, max(1, max_response_tokens // 4)) for _ in range(rng.choice((1, 1, 3)))] for _ in range(size)
    ]
    of_parts = {name: tuple(draw(rng) for _ in range(size)) for name in parts}
    rewards = tuple(map(sum, zip(*of_parts.values(), strict=True))) if parts else tuple(draw(rng) for _ in range(size))
    rollouts = Rollouts(
        rewards=rewards,
        lengths=tuple(map(sum, lengths)),
        truncated=tuple(rng.random() < 0.3 for _ in range(size)),
        parts=of_parts,
        kl=tuple(rng.uniform(-0.1, 0.5) for _ in range(size)) if needs.reward_kl else None,
    )
    responses = [(rollout, _random_tokens(rng, needs, n)) for rollout, own in enumerate(lengths) for n in own]
    return RandomGroup(rollouts, tuple(responses))


def _random_tokens(rng: random.Random, needs: Needs, length: int) -> Tokens:
    """Log-probs that differ enough for every clip."""
    logprobs = [rng.uniform(-3.0, -0.01) for _ in range(length)]

    def near(is_needed: bool = True) -> torch.Tensor | None:
        noise = [min(value + rng.gauss(0.0, rng.choice((0.01, 0.4))), 0.0) for value in logprobs]
        return torch.tensor(noise, dtype=torch.float64) if is_needed else None

    old_logprobs_N = near()
    assert old_logprobs_N is not None
    return Tokens(
        torch.tensor(logprobs, dtype=torch.float64).requires_grad_(),
        torch.tensor([rng.uniform(0.0, 3.0) for _ in range(length)], dtype=torch.float64).requires_grad_(),
        old_logprobs_N,
        near(needs.reference),
        near(needs.teacher),
        near(needs.rollout),
        torch.tensor([rng.gauss(0.0, 1.0) for _ in logprobs], dtype=torch.float64) if needs.values else None,
    )
