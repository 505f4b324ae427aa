"""Checks that a rollout program exists, and that its messages can be rendered; nothing of it is executed."""

import ast

from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
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
        definition = require_function("rollout.program", config.program)
        if definition is not None and not definition.decorator_list:
            _require_async(config.program, definition)
    else:
        raise ConfigError(
            f"rollout.program is {config.program!r}: expected {SINGLE_TURN}, {PREFIX}path/to/file.py:function, or "
            f"{COMMAND}PROGRAM ARGUMENTS"
        )
    require_renderer(config.renderer)


def _require_async(name: str, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    if isinstance(definition, ast.FunctionDef):
        raise ConfigError(
            f"rollout.program {name!r}: line {definition.lineno}: the function is not asynchronous; write `async def`"
        )
    if any(map(_yields, definition.body)):
        raise ConfigError(
            f"rollout.program {name!r}: line {definition.lineno}: the function is a generator; return the reward, "
            "without `yield`"
        )


def _yields(node: ast.AST) -> bool:
    """Whether a statement yields, not counting functions that it defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    return isinstance(node, ast.Yield) or any(map(_yields, ast.iter_child_nodes(node)))
