"""Rewards that an algorithm cannot use are refused by name; where nothing counts, nothing is divided by 0."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from async_rl.errors import RewardError
from async_rl.method.algorithms import Rollouts
from tests.support.algorithms import algorithm_of, rollouts_of


@pytest.mark.parametrize(
    ("settings", "rewards", "says"),
    [
        ({"name": "maxrl"}, (-0.5, 1.0), r"'maxrl' divides by a group's mean reward, but a reward is -0\.5: expected"),
        ({"name": "pf_ppo"}, (1e8, 1.0), r"'pf_ppo' weighs a rollout by \|reward\| \*\* 2, but a reward is 1e\+08"),
    ],
)
def test_a_reward_that_cannot_be_used_is_named(settings: dict[str, Any], rewards: tuple[float, ...], says: str) -> None:
    algorithm = algorithm_of(**settings)
    with pytest.raises(RewardError, match=says):
        algorithm.weights(rollouts_of(rewards))
        algorithm.advantages(rollouts_of(rewards), None)


def test_groups_that_other_parts_scored_do_not_meet_the_weights_of_these() -> None:
    """Rows may choose the parts of their reward, and rollouts may have a reward of their own."""
    algorithm = algorithm_of(name="gdpo", options={"weights": {"math": 2.0, "code": 3.0}}, scale_by_std=False)
    by_code = replace(rollouts_of((0.0, 1.0)), parts={"code": (0.0, 1.0)})
    of_code, of_neither = (algorithm.advantages(each, None) for each in (by_code, rollouts_of((0.0, 1.0))))
    torch.testing.assert_close(of_code, 3 * of_neither)
    assert (
        algorithm.has_gradient(by_code)
        and algorithm.sums(by_code).keys() == algorithm.sums(rollouts_of((1.0, 0.0))).keys()
    )


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1.0, 1e30])
def test_maxrls_advantages_do_not_depend_on_the_scale_of_rewards(scale: float) -> None:
    advantages_G = algorithm_of(name="maxrl").advantages(rollouts_of((0.0, scale, scale, 0.0)), None)
    assert advantages_G.tolist() == [-1.0, 1.0, 1.0, -1.0]


def test_a_batch_of_truncated_rollouts_has_no_gradient_and_no_division_by_zero() -> None:
    algorithm = algorithm_of(name="reinforce_pp_baseline", mask_truncated=True)
    rollouts = rollouts_of((0.0, 1.0), (3, 2), (True, True))
    totals = algorithm.sums(rollouts)
    assert algorithm.denominator(totals) == 0.0
    assert algorithm.advantages(rollouts, totals).isfinite().all() and not algorithm.weights(rollouts).any()


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e5])
def test_the_batchs_deviation_does_not_depend_on_an_offset_of_rewards(offset: float) -> None:
    algorithm = algorithm_of(scale_by_std="batch")
    groups: list[Rollouts] = [rollouts_of((offset, offset + 1.0)), rollouts_of((offset + 0.5, offset + 2.0))]
    totals = {name: sum(algorithm.sums(group)[name] for group in groups) for name in algorithm.sums(groups[0])}
    # Of 0, 1, 0.5 and 2; four tokens.
    assert algorithm.denominator(totals) == pytest.approx(4 * (0.853912563829966 + 1e-6), rel=1e-5)
