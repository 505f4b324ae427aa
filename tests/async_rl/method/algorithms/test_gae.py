"""GAE and value loss against plain loops in Python, on responses of random lengths."""

import math
import random

import pytest
import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.method.algorithms.gae import AdvantageEstimation
from tests.support.algorithms import single_turns

FACTORS = ((1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.97, 1.0))


def estimation(algorithm: dict[str, object] | None = None, **critic: float) -> AdvantageEstimation:
    return AdvantageEstimation(AlgorithmSection.model_validate({"name": "ppo", "options": critic, **(algorithm or {})}))


def in_a_loop(rewards: list[float], values: list[float], gamma: float, factor: float) -> list[float]:
    """The advantages of one response, from its end."""
    advantages, later_value, later_advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later_advantage = reward + gamma * later_value - value + gamma * factor * later_advantage
        later_value = value
        advantages.append(later_advantage)
    return advantages[::-1]


@pytest.mark.parametrize(("gamma", "gae_lambda"), FACTORS)
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_advantages_and_returns_equal_a_loop_over_each_response(
    gamma: float, gae_lambda: float, kl_in: str, rng: random.Random
) -> None:
    gae = estimation({"kl_coef": 0.3, "kl_in": kl_in, "kl_estimator": "k2"}, gamma=gamma, gae_lambda=gae_lambda)
    lengths = [rng.choice((1, 2, rng.randint(1, 90))) for _ in range(rng.randint(1, 6))]
    rewards_G, values_N = torch.randn(len(lengths), dtype=torch.float64), torch.randn(sum(lengths), dtype=torch.float64)
    logprobs_N, ref_N = torch.randn(2, sum(lengths), dtype=torch.float64)
    responses = single_turns(rewards_G, torch.tensor(lengths))
    rewards_N = gae.rewards(responses, logprobs_N, ref_N)
    advantages_N, returns_N = gae.of(rewards_N, values_N, responses)

    start = 0
    for length, reward in zip(lengths, rewards_G.tolist(), strict=True):
        own = slice(start, start + length)
        kl = [0.3 * (a - b) ** 2 / 2 for a, b in zip(logprobs_N[own].tolist(), ref_N[own].tolist(), strict=True)]
        rewards = [-term if kl_in == "reward" else 0.0 for term in kl]
        rewards[-1] += reward
        expected = in_a_loop(rewards, values_N[own].tolist(), gamma, gae_lambda)
        assert rewards_N[own].tolist() == pytest.approx(rewards, rel=1e-12, abs=1e-12)
        assert advantages_N[own].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        returns = [advantage + value for advantage, value in zip(expected, values_N[own].tolist(), strict=True)]
        assert returns_N[own].tolist() == pytest.approx(returns, rel=1e-12, abs=1e-12)
        start += length


def test_with_gamma_and_lambda_1_an_advantage_is_the_reward_less_the_value() -> None:
    values_N = torch.tensor([0.25, 0.5, -1.0, 2.0])
    responses = single_turns(torch.tensor([1.0, 0.0]), torch.tensor([3, 1]))
    gae = estimation()
    advantages_N, returns_N = gae.of(gae.rewards(responses, values_N, None), values_N, responses)
    assert advantages_N.tolist() == [0.75, 0.5, 2.0, -2.0]
    assert returns_N.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_estimates_of_a_response_are_the_same_bits_whatever_is_beside_it(rng: random.Random) -> None:
    gae, lengths = estimation(gamma=0.99, gae_lambda=0.95), [rng.randint(1, 40) for _ in range(8)]
    rewards_G, values_N = torch.randn(8), torch.randn(sum(lengths))
    values = values_N.split(lengths)

    def advantages_of(chosen: list[int]) -> dict[int, list[float]]:
        responses = single_turns(rewards_G[chosen], torch.tensor([lengths[i] for i in chosen]))
        own_N = torch.cat([values[i] for i in chosen])
        found_N, _ = gae.of(gae.rewards(responses, own_N, None), own_N, responses)
        parts = found_N.split([lengths[i] for i in chosen])
        return {i: part.tolist() for i, part in zip(chosen, parts, strict=True)}

    together = advantages_of(rng.sample(range(8), 8))
    assert all(advantages_of([i]) == {i: together[i]} for i in range(8))


def test_a_value_that_is_not_finite_stays_in_its_response() -> None:
    gae, responses = estimation(), single_turns(torch.tensor([1.0, 1.0]), torch.tensor([3, 2]))
    values_N = torch.tensor([0.5, 0.5, math.nan, 0.5, 0.5])
    advantages_N, _ = gae.of(gae.rewards(responses, values_N, None), values_N, responses)
    assert advantages_N.isfinite().tolist() == [False, False, False, True, True]


def test_a_micro_batch_without_responses_has_no_estimates() -> None:
    gae, responses = estimation(), single_turns(torch.empty(0), torch.empty(0, dtype=torch.int64))
    rewards_N = gae.rewards(responses, torch.empty(0), torch.empty(0))
    assert [len(found_N) for found_N in gae.of(rewards_N, torch.empty(0), responses)] == [0, 0]


@pytest.mark.parametrize("value_clip", [0.0, 0.2])
def test_a_value_beyond_the_clip_has_the_larger_loss_and_no_gradient_back_to_it(
    value_clip: float, rng: random.Random
) -> None:
    gae = estimation(value_clip=value_clip)
    values_N = torch.randn(200, dtype=torch.float64).requires_grad_()
    old_N, returns_N = torch.randn(2, 200, dtype=torch.float64)
    loss_N = gae.value_loss(values_N, old_N, returns_N)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), values_N)
    for value, old, wanted, loss, gradient in zip(
        values_N.tolist(), old_N.tolist(), returns_N.tolist(), loss_N.tolist(), gradient_N.tolist(), strict=True
    ):
        near = min(max(value, old - value_clip), old + value_clip) if value_clip else value
        clipped_counts = abs(near - wanted) > abs(value - wanted)
        assert loss == pytest.approx(max((value - wanted) ** 2, (near - wanted) ** 2) / 2)
        assert gradient == pytest.approx(0.0 if clipped_counts else value - wanted)


def test_at_the_old_values_the_clip_changes_nothing() -> None:
    values_N, returns_N = torch.randn(2, 50, dtype=torch.float64)
    found = []
    for clip in (0.0, 0.2):
        leaf_N = values_N.clone().requires_grad_()
        loss_N = estimation(value_clip=clip).value_loss(leaf_N, values_N, returns_N)
        found.append([loss_N.tolist(), torch.autograd.grad(loss_N.sum(), leaf_N)[0].tolist()])
    assert found[0] == found[1]
