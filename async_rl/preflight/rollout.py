"""Checks that a rollout program exists, and that its messages can be rendered; nothing of it is executed."""

from async_rl.config.sections import SINGLE_TURN, RolloutSection
from async_rl.errors import ConfigError
from async_rl.preflight.user_file import PREFIX, require_function
from async_rl.programs.renderer_names import require_renderer
from async_rl.programs.user_command import COMMAND, split_command


def require_program(config: RolloutSection) -> None:
    """Checks `rollout.program` and `rollout.renderer`.

    Raises:
        ConfigError: there is no such program, named with its file and, if possible, the line; or no such renderer.
    """
    if config.program == SINGLE_TURN:
        return
    if config.program.startswith(COMMAND):
        split_command("rollout.program", config.program)
    elif config.program.startswith(PREFIX):
        require_function("rollout.program", config.program)
    else:
        raise ConfigError(
            f"rollout.program is {config.program!r}: expected {SINGLE_TURN}, {PREFIX}path/to/file.py:function, or "
            f"{COMMAND}PROGRAM ARGUMENTS"
        )
    require_renderer(config.renderer)
