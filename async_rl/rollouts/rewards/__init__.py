"""One file per reward: a function (prompt, responses, row) -> one float per response; or a weighted sum of several.

All of them run in worker processes, so that none can block or crash the trainer: synchronous ones one call at a time,
asynchronous ones many concurrently on a loop of their own; each call within `reward.timeout_s`.
"""

from async_rl.config.reward_section import BUILT_IN, RewardSection
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.base import Reward
from async_rl.rollouts.rewards.built_in import EXPECTED
from async_rl.rollouts.rewards.composed_reward import ComposedReward
from async_rl.rollouts.rewards.function import find_file
from async_rl.rollouts.rewards.no_reward import NoReward
from async_rl.rollouts.rewards.process_reward import ProcessReward
from async_rl.shared.programs.user_file import PREFIX

__all__ = ["NoReward", "Reward", "make_reward"]


def make_reward(config: RewardSection) -> Reward:
    """The reward of the config, if it has one; its own code is loaded by `start`, in the processes that run it.

    Raises:
        ConfigError: no such reward, or the file of a `python:` reward does not exist.
    """
    for alone in config.single_rewards.values():
        _require_known(alone.name or "")
    if config.parts:
        return ComposedReward(config)
    return NoReward() if config.name is None else ProcessReward(config, config.name)


def _require_known(name: str) -> None:
    if name.startswith(PREFIX):
        find_file(name)
    elif name not in BUILT_IN:
        raise ConfigError(f"reward.name is {name!r}: expected {EXPECTED}")
