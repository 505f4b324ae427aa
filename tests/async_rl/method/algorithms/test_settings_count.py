"""Every setting that an algorithm accepts changes what it computes; sums that no order of groups changes."""

import itertools
import math
import random
from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from async_rl.errors import ConfigError
from async_rl.method.algorithms import ALGORITHMS
from async_rl.method.algorithms.base import Responses, Rollouts, Tokens, added
from async_rl.method.algorithms.checking import loss_and_gradient, whole
from async_rl.method.algorithms.policy_gradient import clipped_surrogate, deviation
from async_rl.method.algorithms.random_groups import any_reward, random_batch
from tests.support.algorithm_options import CUTTING_ACROSS, OWN, PARTS
from tests.support.algorithms import MAX_RESPONSE_TOKENS, algorithm_of

NEEDED: dict[str, dict[str, Any]] = {"distillation": {"teacher": "teacher"}}
"""What an algorithm does not work without."""

ELSEWHERE = {("reward", "k1"), ("reward", "k2")}

CASES = [
    (name, choices)
    for name in ALGORITHMS
    for choices in (*CUTTING_ACROSS, tuple({"options": each} for each in OWN.get(name, ()) if each))
    # PPO's rewards reach its loss by the critic's values, which the trainer makes.
    if choices and not (name == "ppo" and "overlong_tokens" in choices[-1])
]


def outcome(name: str, settings: dict[str, Any]) -> torch.Tensor | None:
    """Loss and gradients of the same batches under these settings; None if they are refused."""
    try:
        algorithm = algorithm_of(**{"name": name, **NEEDED.get(name, {}), **settings})
    except (ConfigError, ValidationError):
        return None
    parts = PARTS if name == "gdpo" else ()
    found = []
    for seed in range(5):
        batch = random_batch(
            random.Random(seed), algorithm.needs, any_reward, max_response_tokens=MAX_RESPONSE_TOKENS, parts=parts
        )
        loss, gradients = loss_and_gradient(algorithm, batch, whole(batch))
        found += [torch.tensor([loss], dtype=torch.float64), *(each.flatten().double() for each in gradients)]
    return torch.cat(found)


@pytest.mark.computes
@pytest.mark.parametrize(("name", "choices"), CASES, ids=[f"{name}-{number}" for number, (name, _) in enumerate(CASES)])
def test_whatever_is_accepted_makes_a_difference(name: str, choices: tuple[dict[str, Any], ...]) -> None:
    """Between any two of the choices, of which the defaults are one where there is a single other."""
    # A KL in the reward is estimated by the trainer (`rollout_kl`).
    chosen = [each for each in choices if each and (each.get("kl_in"), each.get("kl_estimator")) not in ELSEWHERE]
    found = [(each, outcome(name, each)) for each in (chosen if len(chosen) > 1 else [{}, *chosen])]
    accepted = [(each, result) for each, result in found if result is not None]
    for (one, a), (other, b) in itertools.combinations(accepted, 2):
        assert a.shape != b.shape or not torch.equal(a, b), f"{name}: {one} and {other} are the same"


def test_the_clip_fraction_counts_what_the_clip_decides() -> None:
    ratios, advantages = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 0.0])
    loss, metrics = clipped_surrogate(ratios, advantages, 0.2, 0.2)
    assert loss.tolist() == pytest.approx([-0.5, 0.8, -1.0, -1.2, 1.5, 0.0])
    assert metrics["clip_fraction"] == 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_online_dpo_reports_the_kl_that_the_config_names(estimator: str) -> None:
    algorithm = ALGORITHMS["online_dpo"]
    made = algorithm_of(name="online_dpo")
    made.config = made.config.model_copy(update={"kl_estimator": estimator})
    batch = random_batch(random.Random(3), made.needs, any_reward, max_response_tokens=MAX_RESPONSE_TOKENS)
    assert isinstance(made, algorithm)
    (_, tokens), *_ = batch[0].responses
    expected = {"k1": -1.0, "k2": 0.5, "k3": math.exp(1) - 2}[estimator]
    assert expected_kl(made, tokens) == pytest.approx(expected * len(tokens), rel=1e-6)


def expected_kl(algorithm: Any, tokens: Tokens) -> float:
    """The metric `kl` of one response whose reference has log-probs higher by 1 at each token."""
    moved = replace(tokens, ref_logprobs_N=tokens.logprobs_N.detach() + 1)
    one = torch.ones(1, dtype=tokens.logprobs_N.dtype)
    lengths = torch.tensor([len(tokens)])
    responses = Responses(one, one, lengths, lengths, torch.zeros(1, dtype=torch.long))
    return float(algorithm.loss_sum(moved, responses).metrics["kl"])


def test_the_batchs_deviation_survives_a_mean_of_a_million_deviations() -> None:
    rng = random.Random(0)
    algorithm = algorithm_of(name="grpo", scale_by_std="batch")
    groups = [tuple(1e6 + rng.gauss(0, 1) for _ in range(8)) for _ in range(8192)]
    rollouts = [Rollouts(rewards=rewards, lengths=(4,) * 8, truncated=(False,) * 8) for rewards in groups]
    sums = [algorithm.sums(each) for each in rollouts]
    expected = stdev([reward for rewards in groups for reward in rewards])
    assert deviation(added(sums)) == pytest.approx(expected, rel=2e-4)
    rng.shuffle(sums)
    assert deviation(added(sums)) == deviation(added(sums[::-1]))
