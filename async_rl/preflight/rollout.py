"""Checks that a rollout program exists, and that its messages can be rendered; nothing of it is executed."""

from async_rl.config.sections import SINGLE_TURN, RolloutSection
from async_rl.errors import ConfigError
from async_rl.preflight.user_file import PREFIX, require_function
from async_rl.programs.extras import require_extras

TEMPLATE = "template"


def require_program(config: RolloutSection) -> None:
    """Checks `rollout.program`, and that the package of `rollout.renderer` is installed.

    Raises:
        ConfigError: there is no such program; names the file and, if possible, the line.
    """
    if config.program == SINGLE_TURN:
        return
    if not config.program.startswith(PREFIX):
        raise ConfigError(
            f"rollout.program is {config.program!r}: expected {SINGLE_TURN}, or {PREFIX}path/to/file.py:function"
        )
    require_function("rollout.program", config.program)
    if config.renderer != TEMPLATE:
        require_extras(f"rollout.renderer = {config.renderer!r}", "agents")
