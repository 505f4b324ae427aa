"""What a reward is made of, so that a run that goes on can tell whether it still is the same one."""

import hashlib
from importlib.metadata import PackageNotFoundError, version

from async_rl.rewards.function import PREFIX, find_file

PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym"}


def reward_identity(name: str) -> str:
    """A text that changes with what the reward computes: the source of its file, or the version of its package.

    What the file imports, and services that it asks, it cannot tell.

    Raises:
        ConfigError: the file of a `python:` reward does not exist.
    """
    if name.startswith(PREFIX):
        path, function = find_file(name)
        return f"{function} in a file with sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    package = PACKAGES[name]
    try:
        return f"{name} by {package} {version(package)}"
    except PackageNotFoundError:
        return f"{name} by {package} of an unknown version"
