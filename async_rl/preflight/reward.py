"""Checks that a reward exists; nothing of it is executed."""

from importlib.util import find_spec

from async_rl.config.sections import Config, RewardSection
from async_rl.errors import ConfigError
from async_rl.preflight.user_file import PREFIX, require_function
from async_rl.rewards.code import USED_SHARE
from async_rl.sandbox.probe import require_installed

BUILT_IN = {
    "reasoning_gym": ("reasoning_gym", "reasoning-gym: install async-rl[tasks]"),
    "math": ("math_verify", "math-verify: install async-rl[tasks]"),
}
"""Name -> the module that it needs, and what to install for it."""


def require_reward(config: RewardSection) -> None:
    """Checks that `reward.name`, if it is set, is a reward that exists.

    Raises:
        ConfigError: it does not; for a `python:` reward it names the file and, if possible, the line.
    """
    name = config.name
    if name is None:
        return
    if name.startswith(PREFIX):
        require_function("reward.name", name)
        return
    if name == "code":
        require_installed()
        return
    if name not in BUILT_IN:
        raise ConfigError(
            f"reward.name is {name!r}: expected {', '.join(BUILT_IN)}, code, or {PREFIX}path/to/file.py:function"
        )
    module, package = BUILT_IN[name]
    if find_spec(module) is None:
        raise ConfigError(f"reward.name {name!r} needs {package}")


def require_time_for_tests(config: Config) -> None:
    """Checks for the reward `code` that each response of a group has the time of at least one of its tests.

    Raises:
        ConfigError: `reward.timeout_s` is too short.
    """
    reward, num_responses = config.reward, config.rollout.responses_per_prompt
    needed_s = num_responses * reward.test_timeout_s / USED_SHARE
    if reward.name == "code" and reward.timeout_s < needed_s:
        raise ConfigError(
            f"reward.timeout_s = {reward.timeout_s:g} is too short for one test of {reward.test_timeout_s:g} s "
            f"(reward.test_timeout_s) in each of {num_responses} responses: set it to at least {needed_s:.4g}"
        )
