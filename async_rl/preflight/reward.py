"""Checks that a reward exists; nothing of it is executed."""

from importlib.util import find_spec

from async_rl.config.sections import RewardSection
from async_rl.errors import ConfigError
from async_rl.preflight.user_file import PREFIX, require_function

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
    if name not in BUILT_IN:
        raise ConfigError(
            f"reward.name is {name!r}: expected {', '.join(BUILT_IN)}, or {PREFIX}path/to/file.py:function"
        )
    module, package = BUILT_IN[name]
    if find_spec(module) is None:
        raise ConfigError(f"reward.name {name!r} needs {package}")
