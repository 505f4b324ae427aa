"""Identifies a reward's implementation, so that a resumed run can check that it is unchanged."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

from async_rl import __version__
from async_rl.config.reward_section import JudgeOptions, RewardSection
from async_rl.rollouts.rewards.built_in import PACKAGES
from async_rl.rollouts.rewards.function import SETTING
from async_rl.rollouts.rewards.rubric import rubric_text
from async_rl.shared.programs.user_file import PREFIX, file_identity


def reward_identity(config: RewardSection) -> str:
    """A text that changes when the reward's computation changes: the hash of its file, or the version of its package;
    of a composed reward those of its parts.

    It does not cover modules that the file imports, and services that it calls.

    Raises:
        ConfigError: the file of a `python:` reward, or of a rubric, does not exist.
    """
    rewards = config.single_rewards
    if not config.parts:
        return next(map(_identity, rewards.values()), "none")
    return "; ".join(f"{label}: {_identity(alone)}" for label, alone in rewards.items())


def _identity(config: RewardSection) -> str:
    name = config.name or ""
    if name.startswith(PREFIX):
        return file_identity(SETTING, name)
    if name == "code":
        return f"code by async-rl {__version__} in Python {platform.python_version()}"
    if name == "judge":
        digest = hashlib.sha256(rubric_text(config.read_options(JudgeOptions).rubric).encode()).hexdigest()[:16]
        return f"judge by async-rl {__version__}, with a rubric with sha256 {digest}"
    package = PACKAGES.get(name)
    if package is None:
        return f"{name} by async-rl {__version__}"
    try:
        return f"{name} by {package} {version(package)}"
    except PackageNotFoundError:
        return f"{name} by {package} of an unknown version"
