"""Rewards that run, for the tests of all kinds of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from async_rl.config.reward_section import RewardSection
from async_rl.rollouts.rewards import make_reward
from async_rl.rollouts.rewards.base import Reward
from async_rl.shared.event_loop import EventLoopThread


@pytest.fixture
def started(loop: EventLoopThread) -> Iterator[Callable[..., Reward]]:
    """`started("math", num_workers=2)`: the reward with these settings, started; closed after the test."""
    rewards: list[Reward] = []

    def start(name: str | None = None, **section: Any) -> Reward:
        rewards.append(make_reward(RewardSection.model_validate({"name": name, **section})))
        loop.run(rewards[-1].start())
        return rewards[-1]

    yield start
    for reward in rewards:
        loop.run(reward.close())
