"""Loads a reward's function by the reward's name, and reads the function's traits; in the workers only."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.base import CORRECT_AT, PER_RESPONSE, is_reward
from async_rl.rollouts.rewards.built_in import IN_PARTS
from async_rl.rollouts.rewards.signatures import adapted
from async_rl.shared.programs import user_file
from async_rl.shared.programs.parts import load_part
from async_rl.shared.programs.user_file import PREFIX, is_async, load_from_file

SETTING = "reward.name"

RewardFunction = Callable[..., Any]
"""function(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> one float per response"""


@dataclass(frozen=True, slots=True)
class RewardTraits:
    """A reward function's properties: whether it is asynchronous, from which reward on responses are correct, and
    whether each response of a call counts for `reward.max_concurrency`, instead of the call.
    """

    is_async: bool
    correct_at: float | None
    per_response: bool = False

    @classmethod
    def of(cls, function: RewardFunction) -> "RewardTraits":
        """The traits of a loaded function.

        Raises:
            ConfigError: its `correct_at` is not a finite number.
        """
        threshold = getattr(function, CORRECT_AT, None)
        if threshold is not None and not (isinstance(threshold, int | float) and is_reward(threshold)):
            raise ConfigError(f"its {CORRECT_AT} is {threshold!r}: expected a number, the least reward that is correct")
        return cls(
            is_async(function), None if threshold is None else float(threshold), getattr(function, PER_RESPONSE, False)
        )


def find_file(name: str) -> tuple[Path, str]:
    """See `user_file.find_file`."""
    return user_file.find_file(SETTING, name)


def load_function(config: RewardSection) -> RewardFunction:
    """The function of a built-in reward or of `python:path/to/file.py:function`.

    Raises:
        ConfigError: the file or function does not exist, loading it failed (with its traceback), it is no reward, or
            the part that has it is missing.
    """
    name = config.name
    assert name is not None, "without a reward nothing is loaded"
    if name.startswith(PREFIX):
        loaded = load_from_file(SETTING, name)
        try:
            return adapted(loaded)
        except ValueError as error:
            raise ConfigError(f"{SETTING} {name!r}: {error}; write it in one of these forms") from error
    module = load_part(IN_PARTS[name], name) if name in IN_PARTS else import_module(f"async_rl.rollouts.rewards.{name}")
    function: RewardFunction = module.make_score(config) if hasattr(module, "make_score") else module.score
    return function
