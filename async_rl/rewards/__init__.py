"""One file per reward: a function (prompt, responses, row) -> one float per response.

Synchronous ones run in worker processes, asynchronous ones on the producer's event loop; both within
`reward.timeout_s`.
"""

from async_rl.config import RewardSection
from async_rl.errors import ConfigError
from async_rl.rewards.async_reward import AsyncReward
from async_rl.rewards.base import Reward
from async_rl.rewards.function import PREFIX, is_async, load_function
from async_rl.rewards.process_reward import ProcessReward

__all__ = ["Reward", "make_reward"]

BUILT_IN = ("reasoning_gym", "math")


def make_reward(config: RewardSection) -> Reward:
    """The reward a config names.

    Raises:
        ConfigError: no such reward, or the file or the function of a `python:` reward does not exist or fails to load.
    """
    if config.name in BUILT_IN:
        return ProcessReward(config.name, config.timeout_s, config.num_workers)
    if not config.name.startswith(PREFIX):
        raise ConfigError(
            f"reward.name is {config.name!r}: expected {', '.join(BUILT_IN)} or {PREFIX}path/to/file.py:function"
        )
    function = load_function(config.name)
    if is_async(function):
        return AsyncReward(config.name, function, config.timeout_s)
    return ProcessReward(config.name, config.timeout_s, config.num_workers)
