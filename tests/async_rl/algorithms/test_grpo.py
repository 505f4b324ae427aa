"""GRPO against its formulas written out per response in float64, forward and gradients, on fresh random inputs."""

import itertools
import math
import random

import pytest
import torch

from async_rl.algorithms import make_algorithm
from async_rl.config import AlgorithmSection

LENGTHS = (3, 1, 5, 2)


def reference_loss(
    logprobs: list[torch.Tensor],
    old: list[torch.Tensor],
    ref: list[torch.Tensor],
    advantages: list[float],
    config: AlgorithmSection,
) -> torch.Tensor:
    """Sum over responses of per-token clipped objectives, one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for g, advantage in enumerate(advantages):
        response = torch.zeros((), dtype=torch.float64)
        for t in range(len(logprobs[g])):
            ratio = torch.exp(logprobs[g][t] - old[g][t])
            low, high = 1 - config.clip_low, 1 + config.clip_high
            inside = low if ratio < low else high if ratio > high else ratio
            objective = min(ratio * advantage, inside * advantage)
            delta = ref[g][t] - logprobs[g][t]
            response = response - objective + config.kl_coef * (torch.exp(delta) - delta - 1)
        total = total + (response / len(logprobs[g]) if config.normalize == "sequence" else response)
    return total


@pytest.mark.parametrize(
    ("normalize", "kl_coef", "clip"),
    list(itertools.product(("token", "sequence"), (0.0, 0.3), ((0.2, 0.2), (0.1, 0.4)))),
)
def test_loss_and_gradient_equal_the_written_out_formula(
    normalize: str, kl_coef: float, clip: tuple[float, float]
) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    config = AlgorithmSection.model_validate(
        {"normalize": normalize, "kl_coef": kl_coef, "clip_low": clip[0], "clip_high": clip[1]}
    )
    algorithm = make_algorithm(config)
    logprobs = (-2 * torch.rand(sum(LENGTHS), dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() + 0.4 * torch.randn(sum(LENGTHS), dtype=torch.float64)
    ref = logprobs.detach() + 0.4 * torch.randn(sum(LENGTHS), dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), dtype=torch.float64)

    ours = algorithm.loss_sum(
        logprobs, old, ref if algorithm.needs_reference else None, advantages, torch.tensor(LENGTHS)
    )
    (gradient,) = torch.autograd.grad(ours.loss, logprobs)
    expected = reference_loss(
        list(logprobs.split(LENGTHS)), list(old.split(LENGTHS)), list(ref.split(LENGTHS)), advantages.tolist(), config
    )
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    torch.testing.assert_close(ours.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert ours.count == (sum(LENGTHS) if normalize == "token" else len(LENGTHS))


def test_the_sum_over_groups_does_not_depend_on_how_they_are_cut() -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    algorithm = make_algorithm(AlgorithmSection(normalize="sequence"))
    logprobs = -torch.rand(8, dtype=torch.float64)
    old = logprobs + 0.1 * torch.randn(8, dtype=torch.float64)
    advantages = torch.randn(4, dtype=torch.float64)
    lengths = torch.tensor([2, 3, 1, 2])
    whole = algorithm.loss_sum(logprobs, old, None, advantages, lengths)
    first = algorithm.loss_sum(logprobs[:5], old[:5], None, advantages[:2], lengths[:2])
    second = algorithm.loss_sum(logprobs[5:], old[5:], None, advantages[2:], lengths[2:])
    torch.testing.assert_close(whole.loss, first.loss + second.loss, rtol=1e-14, atol=1e-14)
    assert whole.count == first.count + second.count


def test_advantages_are_centered_and_scaled_by_the_sample_deviation() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.5])
    scaled = make_algorithm(AlgorithmSection()).advantages(rewards)
    mean, std = 0.625, math.sqrt(sum((r - 0.625) ** 2 for r in (0.0, 1.0, 1.0, 0.5)) / 3)
    torch.testing.assert_close(scaled, (rewards - mean) / (std + 1e-6))
    centered = make_algorithm(AlgorithmSection(scale_by_std=False)).advantages(rewards)
    torch.testing.assert_close(centered, rewards - mean)


@pytest.mark.parametrize("rewards", [[1.0], [0.5, 0.5, 0.5]])
def test_a_group_without_contrast_has_no_advantage(rewards: list[float]) -> None:
    advantages = make_algorithm(AlgorithmSection()).advantages(torch.tensor(rewards))
    assert torch.equal(advantages, torch.zeros(len(rewards)))


def test_no_reference_is_needed_without_kl() -> None:
    assert not make_algorithm(AlgorithmSection(kl_coef=0.0)).needs_reference
    assert make_algorithm(AlgorithmSection(kl_coef=0.01)).needs_reference
