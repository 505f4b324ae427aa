"""One file per reward: a function (prompt, responses, row) -> one float per response.

All of them run in worker processes, so that none can block or crash the trainer: synchronous ones one call at a time,
asynchronous ones many concurrently on a loop of their own; each call within `reward.timeout_s`.
"""

from async_rl.config.sections import RewardSection
from async_rl.errors import ConfigError
from async_rl.programs.user_file import PREFIX
from async_rl.rewards.base import Reward
from async_rl.rewards.function import find_file
from async_rl.rewards.no_reward import NoReward
from async_rl.rewards.process_reward import ProcessReward

__all__ = ["NoReward", "Reward", "make_reward"]

BUILT_IN = ("reasoning_gym", "math")


def make_reward(config: RewardSection) -> Reward:
    """The reward named by the config, if one is; its own code is loaded by `start`, in the processes that run it.

    Raises:
        ConfigError: no such reward, or the file of a `python:` reward does not exist.
    """
    if config.name is None:
        return NoReward()
    if config.name.startswith(PREFIX):
        find_file(config.name)
    elif config.name not in BUILT_IN:
        raise ConfigError(
            f"reward.name is {config.name!r}: expected {', '.join(BUILT_IN)} or {PREFIX}path/to/file.py:function"
        )
    return ProcessReward(config, config.name)
