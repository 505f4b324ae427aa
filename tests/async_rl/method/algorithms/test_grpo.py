"""GRPO against its formulas written out per response in float64, forward and gradients, on fresh random inputs."""

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.method.algorithms import Responses, Tokens
from tests.support.algorithms import algorithm_of, rollouts_of, single_turns

LENGTHS = (3, 1, 5, 2)


def tokens_of(logprobs: torch.Tensor, old: torch.Tensor, ref: torch.Tensor | None = None) -> Tokens:
    return Tokens(logprobs, torch.zeros_like(logprobs), old, ref)


def reference_loss(
    logprobs: list[torch.Tensor],
    old: list[torch.Tensor],
    ref: list[torch.Tensor],
    advantages: list[float],
    normalize: str,
    kl_coef: float,
    clip: tuple[float, float],
) -> torch.Tensor:
    """Sum over responses of per-token clipped objectives, one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for g, advantage in enumerate(advantages):
        response = torch.zeros((), dtype=torch.float64)
        for t in range(len(logprobs[g])):
            ratio = torch.exp(logprobs[g][t] - old[g][t])
            low, high = 1 - clip[0], 1 + clip[1]
            inside = low if ratio < low else high if ratio > high else ratio
            objective = min(ratio * advantage, inside * advantage)
            delta = ref[g][t] - logprobs[g][t]
            response = response - objective + kl_coef * (torch.exp(delta) - delta - 1)
        total = total + (response / len(logprobs[g]) if normalize == "sequence" else response)
    return total


@pytest.mark.parametrize(
    ("normalize", "kl_coef", "clip"),
    list(itertools.product(("token", "sequence"), (0.0, 0.3), ((0.2, 0.2), (0.1, 0.4)))),
)
def test_loss_and_gradient_equal_the_written_out_formula(
    normalize: str, kl_coef: float, clip: tuple[float, float]
) -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    algorithm = algorithm_of(normalize=normalize, kl_coef=kl_coef, clip_low=clip[0], clip_high=clip[1])
    logprobs = (-2 * torch.rand(sum(LENGTHS), dtype=torch.float64)).requires_grad_()
    old = logprobs.detach() + 0.4 * torch.randn(sum(LENGTHS), dtype=torch.float64)
    ref = logprobs.detach() + 0.4 * torch.randn(sum(LENGTHS), dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), dtype=torch.float64)

    tokens = tokens_of(logprobs, old, ref if algorithm.needs.reference else None)
    ours = algorithm.loss_sum(tokens, single_turns(advantages, torch.tensor(LENGTHS)))
    (gradient,) = torch.autograd.grad(ours.loss, logprobs)
    expected = reference_loss(
        list(logprobs.split(LENGTHS)),
        list(old.split(LENGTHS)),
        list(ref.split(LENGTHS)),
        advantages.tolist(),
        normalize,
        kl_coef,
        clip,
    )
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    torch.testing.assert_close(ours.loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    totals = algorithm.sums(rollouts_of([0.0] * len(LENGTHS), LENGTHS))
    assert algorithm.denominator(totals) == (sum(LENGTHS) if normalize == "token" else len(LENGTHS))


def test_the_sum_over_groups_does_not_depend_on_how_they_are_cut() -> None:
    torch.manual_seed(random.SystemRandom().randrange(2**31))
    algorithm = algorithm_of(normalize="sequence")
    logprobs = -torch.rand(8, dtype=torch.float64)
    old = logprobs + 0.1 * torch.randn(8, dtype=torch.float64)
    advantages = torch.randn(4, dtype=torch.float64)
    lengths = torch.tensor([2, 3, 1, 2])
    whole = algorithm.loss_sum(tokens_of(logprobs, old), single_turns(advantages, lengths))
    first = algorithm.loss_sum(tokens_of(logprobs[:5], old[:5]), single_turns(advantages[:2], lengths[:2]))
    second = algorithm.loss_sum(tokens_of(logprobs[5:], old[5:]), single_turns(advantages[2:], lengths[2:]))
    torch.testing.assert_close(whole.loss, first.loss + second.loss, rtol=1e-14, atol=1e-14)


@settings(max_examples=60)
@given(
    branches=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=4),
    normalize=st.sampled_from(["token", "sequence"]),
    seed=st.integers(0, 2**32),
)
def test_a_rollouts_length_is_that_of_all_its_responses(branches: list[list[int]], normalize: str, seed: int) -> None:
    """The responses of each rollout, of these lengths, in any order and in one call each, against a plain loop."""
    rng = random.Random(seed)
    algorithm = algorithm_of(normalize=normalize, kl_coef=0.2)
    advantages = algorithm.advantages(rollouts_of([rng.random() for _ in branches]), None)
    parts = [(rollout, number) for rollout, lengths in enumerate(branches) for number in range(len(lengths))]
    rng.shuffle(parts)
    loss, expected = torch.zeros((), dtype=torch.float64), 0.0
    for rollout, number in parts:
        length, of_rollout = branches[rollout][number], sum(branches[rollout])
        new, old, ref = (torch.tensor([rng.uniform(-2, 0) for _ in range(length)]).double() for _ in range(3))
        responses = Responses(
            advantages[rollout : rollout + 1],
            torch.ones(1, dtype=torch.float64),
            torch.tensor([length]),
            torch.tensor([of_rollout]),
            torch.tensor([0]),
        )
        loss = loss + algorithm.loss_sum(tokens_of(new, old, ref), responses).loss
        for t in range(length):
            ratio, gap = math.exp(new[t] - old[t]), float(ref[t] - new[t])
            advantage = float(advantages[rollout])
            term = -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage) + 0.2 * (math.exp(gap) - gap - 1)
            expected += term / of_rollout if normalize == "sequence" else term
    assert float(loss) == pytest.approx(expected, rel=1e-12, abs=1e-12)


SCALES = (5e-324, 1e-300, 1e-6, 0.7, 1000.1, 1e30)
REWARDS = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 0.1, 0.7, *SCALES, *(-scale for scale in SCALES)]),
        st.floats(-1e30, 1e30, allow_nan=False),
        st.floats(0.7, 0.7 + 1e-12),
    ),
    min_size=1,
    max_size=12,
)


def exact_advantages(rewards: list[float], scale_by_std: bool) -> list[float]:
    """In rational numbers, but for the square root."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    if not scale_by_std or len(exact) < 2:
        return [float(reward - mean) for reward in exact]
    std = Fraction(math.sqrt(sum((reward - mean) ** 2 for reward in exact) / (len(exact) - 1)))
    return [float((reward - mean) / (std + Fraction(1e-6))) for reward in exact]


@given(rewards=REWARDS, scale_by_std=st.booleans())
def test_advantages_are_the_exact_ones_within_the_rounding_of_rewards(rewards: list[float], scale_by_std: bool) -> None:
    advantages = algorithm_of(scale_by_std=scale_by_std).advantages(rollouts_of(rewards), None)
    expected = exact_advantages(rewards, scale_by_std)
    assert advantages.dtype == torch.float64 and advantages.isfinite().all()
    # The mean is off by a rounding of its terms, relative to the largest, over what the difference is divided by.
    largest = max(map(abs, rewards))
    spread = max(rewards) - min(rewards)
    off = len(rewards) * 2.0**-52 * largest
    if scale_by_std:
        off /= spread / (2 * len(rewards) ** 0.5) + 1e-6
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=4 * off + 1e-300)


@given(
    reward=st.one_of(st.sampled_from([0.0, -0.0, *SCALES]), st.floats(-1e30, 1e30)),
    group_size=st.one_of(st.integers(1, 20), st.just(1024)),
    scale_by_std=st.booleans(),
)
def test_equal_rewards_have_no_advantage_and_no_gradient(reward: float, group_size: int, scale_by_std: bool) -> None:
    algorithm = algorithm_of(scale_by_std=scale_by_std)
    assert torch.equal(
        algorithm.advantages(rollouts_of([reward] * group_size), None), torch.zeros(group_size, dtype=torch.float64)
    )
    assert not algorithm.has_gradient(rollouts_of([reward] * group_size))
    assert algorithm_of(kl_coef=0.1).has_gradient(rollouts_of([reward] * group_size))


def test_zeros_of_either_sign_are_equal_and_a_difference_in_the_last_bit_is_one() -> None:
    algorithm = algorithm_of()
    assert not algorithm.advantages(rollouts_of([0.0, -0.0, 0.0]), None).any() and not algorithm.has_gradient(
        rollouts_of([0.0, -0.0])
    )
    assert algorithm.has_gradient(rollouts_of([0.3, 0.1 + 0.2]))
    assert (
        algorithm.advantages(rollouts_of([0.3, 0.1 + 0.2]), None).abs().max() < 1e-9
    )  # far below the 1e-6 beside the deviation


@pytest.mark.parametrize("log_ratio", [20.0, 21.0, 90.0, 1e4, -90.0, -1e4])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 1.5])
def test_any_log_ratio_has_a_finite_loss_and_gradient(log_ratio: float, advantage: float) -> None:
    algorithm = algorithm_of(kl_coef=0.1)
    logprobs = torch.tensor([-0.5], requires_grad=True)
    others = torch.tensor([-0.5 + log_ratio]), torch.tensor([-0.5 - log_ratio])
    for old, ref in (others, others[::-1]):
        result = algorithm.loss_sum(
            tokens_of(logprobs, old, ref), single_turns(torch.tensor([advantage]), torch.tensor([1]))
        )
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert result.loss.isfinite() and gradient.isfinite()
        assert result.metrics["kl"].isfinite()
        # A far reference still pulls the policy up, as k3 does; the policy's own part may push it further down.
        if ref > logprobs and advantage >= 0:
            assert gradient < 0


def test_beyond_the_bound_k3_goes_on_along_its_tangent() -> None:
    algorithm = algorithm_of(kl_coef=1.0)
    steps = torch.tensor([19.999, 20.0, 20.001, 25.0], dtype=torch.float64)
    logprobs = (-steps).requires_grad_()
    responses = single_turns(torch.zeros(1), torch.tensor([4]))
    loss = algorithm.loss_sum(tokens_of(logprobs, logprobs.detach(), torch.zeros(4)), responses).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    slope = math.exp(20) - 1
    expected = [math.exp(19.999) - 1, slope, slope, slope]
    assert (-gradient).tolist() == pytest.approx(expected, rel=1e-12)
    at_bound = math.exp(20) - 21
    assert float(loss.detach()) == pytest.approx(math.exp(19.999) - 20.999 + 3 * at_bound + slope * 5.001, rel=1e-12)


def test_no_reference_is_needed_without_kl() -> None:
    assert not algorithm_of(kl_coef=0.0).needs.reference
    assert algorithm_of(kl_coef=0.01).needs.reference
