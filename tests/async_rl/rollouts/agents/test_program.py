"""What a rollout program may return: nothing, a number, or an object with its rewards."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.rollouts.agents.program import RolloutResult


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, RolloutResult()),
        (1, RolloutResult(1.0)),
        (SimpleNamespace(reward=None, turn_rewards=None), RolloutResult()),
        (SimpleNamespace(reward=0.5, turn_rewards=iter([1, 2])), RolloutResult(0.5, (1.0, 2.0))),
        (RolloutResult(1.5, (1.0, 0.5)), RolloutResult(1.5, (1.0, 0.5))),
    ],
)
def test_a_result_is_nothing_a_number_or_an_object_with_rewards(returned: object, expected: RolloutResult) -> None:
    assert RolloutResult.of(returned) == expected


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (float("nan"), "it returned nan as a reward"),
        ("1.0", "it returned '1.0' as a reward"),
        (1e99, r"it returned 1e\+99 as a reward"),
        (SimpleNamespace(reward=[0] * 10**6), "as a reward"),
        (SimpleNamespace(reward=1.0, turn_rewards=[0.5, float("inf")]), "it returned inf as a turn's"),
        (SimpleNamespace(reward=1.0, turn_rewards=count()), "more than 10,000 turn_rewards"),
    ],
    ids=range(6),
)
def test_what_is_no_reward_is_named_in_short(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RolloutResult.of(returned)
    assert len(str(caught.value)) < 400
