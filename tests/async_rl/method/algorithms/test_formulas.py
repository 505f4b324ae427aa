"""Every algorithm, with whatever cuts across, against its formulas written out per token, on fresh random groups."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.method.algorithms import ALGORITHMS, PolicyGradient, Tokens
from async_rl.method.algorithms.checking import loss_and_gradient, whole
from async_rl.method.algorithms.random_groups import RandomGroup, any_reward, random_batch
from tests.support.algorithm_formulas import Written
from tests.support.algorithm_options import PARTS, random_settings
from tests.support.algorithms import MAX_RESPONSE_TOKENS, algorithm_of

NUM_SETTINGS = 12
"""For each algorithm, in every run of the test: the first without any option."""

PLAIN: dict[str, dict[str, Any]] = {name: {"name": name} for name in ALGORITHMS}
PLAIN["distillation"]["teacher"] = "teacher"


def gradients_of(loss: torch.Tensor, batch: Sequence[RandomGroup]) -> list[torch.Tensor]:
    leaves = [
        leaf for group in batch for _, tokens in group.responses for leaf in (tokens.logprobs_N, tokens.entropy_N)
    ]
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if own is None else own for own, leaf in zip(found, leaves, strict=True)]


def with_nodes(batch: Sequence[RandomGroup], algorithm: PolicyGradient, rng: random.Random) -> list[RandomGroup]:
    """With what nodes of the pipeline may write: weights of rollouts, and weights and rewards of tokens."""
    needs = algorithm.needs
    divides_all = algorithm.scale_by_std == "batch" and not needs.totals

    def of_tokens(tokens: Tokens) -> Tokens:
        if needs.whole_groups or needs.values:
            return tokens
        weights, rewards = zip(*((rng.uniform(0, 3), rng.gauss(0, 1)) for _ in range(len(tokens))), strict=True)
        numbers = {"weights_N": weights} if divides_all else {"weights_N": weights, "rewards_N": rewards}
        return replace(tokens, **{name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()})

    def of_group(group: RandomGroup) -> RandomGroup:
        weights = [rng.choice((0.0, 1.0) if needs.whole_groups else (0.0, 0.5, 2.5)) for _ in group.rollouts.rewards]
        return RandomGroup(
            replace(group.rollouts, weights=tuple(weights)),
            tuple((rollout, of_tokens(tokens)) for rollout, tokens in group.responses),
        )

    return list(map(of_group, batch))


@pytest.mark.computes
@pytest.mark.parametrize("nodes", [False, True], ids=["", "nodes"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_formulas_written_out_per_token(name: str, nodes: bool, rng: random.Random) -> None:
    for number in range(NUM_SETTINGS):
        settings = random_settings(name, rng) if number else PLAIN[name]
        algorithm = algorithm_of(**settings)
        parts = PARTS if name == "gdpo" else ()
        batch = random_batch(rng, algorithm.needs, any_reward, max_response_tokens=MAX_RESPONSE_TOKENS, parts=parts)
        if nodes:
            batch = with_nodes(batch, algorithm, rng)
        # Numbers that float32 has, so that both compute with the same.
        batch = [group.to(torch.float32).to(torch.float64) for group in batch]
        expected = Written(settings, batch).loss()
        expected_gradients = gradients_of(expected, batch)
        largest = max(float(gradient.abs().max()) for gradient in expected_gradients)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
            loss, gradients = loss_and_gradient(algorithm, [group.to(dtype) for group in batch], whole(batch))
            # A loss is a sum of terms that cancel each other.
            assert loss == pytest.approx(float(expected.detach()), rel=tolerance, abs=tolerance * (1 + largest)), (
                settings
            )
            for ours, theirs in zip(gradients, expected_gradients, strict=True):
                assert float((ours.double() - theirs).abs().max()) <= tolerance * largest, settings
