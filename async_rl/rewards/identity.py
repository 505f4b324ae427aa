"""Identifies a reward's implementation, so that a resumed run can check that it is unchanged."""

from importlib.metadata import PackageNotFoundError, version

from async_rl.programs.user_file import PREFIX, file_identity
from async_rl.rewards.function import SETTING

PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}


def reward_identity(name: str | None) -> str:
    """A text that changes when the reward's computation changes: the hash of its file, or the version of its package.

    It does not cover modules that the file imports, and services that it calls.

    Raises:
        ConfigError: the file of a `python:` reward does not exist.
    """
    if name is None:
        return "none"
    if name.startswith(PREFIX):
        return file_identity(SETTING, name)
    package = PACKAGES[name]
    try:
        return f"{name} by {package} {version(package)}"
    except PackageNotFoundError:
        return f"{name} by {package} of an unknown version"
