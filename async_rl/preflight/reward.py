"""Checks from the text of its file that a reward exists; nothing of it is executed.

Errors during the loading of the file are reported by its worker process (`async_rl.rewards`).
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from async_rl.config.sections import Config, RewardSection
from async_rl.errors import ConfigError
from async_rl.rewards.code import USED_SHARE
from async_rl.sandbox.probe import require_installed

PREFIX = "python:"
BUILT_IN = {
    "reasoning_gym": ("reasoning_gym", "reasoning-gym: install async-rl[tasks]"),
    "math": ("math_verify", "math-verify: install async-rl[tasks]"),
}
"""Name -> the module that it needs, and what to install for it."""

OPEN_ENDED = {"exec", "globals", "setattr", "vars", "__getattr__"}
"""Code that uses one of these may give a module names that its text does not show."""


def require_reward(config: RewardSection) -> None:
    """Checks that `reward.name` is a reward that exists.

    Raises:
        ConfigError: it does not; for a `python:` reward it names the file and, if possible, the line.
    """
    name = config.name
    if name.startswith(PREFIX):
        _require_function(name)
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


def _require_function(name: str) -> None:
    file, colon, function = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ConfigError(
            f"reward.name is {name!r}, but there is no file {file!r}: write {PREFIX}path/to/file.py:function"
        )
    module = _parse(name, path)
    for statement in module.body:
        for package in _packages(statement):
            if not _is_there(package, path.parent):
                raise ConfigError(
                    f"reward.name {name!r}: {file}, line {statement.lineno}: there is no module {package!r}; "
                    "install it, or correct the file"
                )
    names = set(_bound_names(module))
    if function not in names and not _is_open_ended(module):
        functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        raise ConfigError(f"reward.name {name!r}: {file} has no function {function!r}; it has {functions}")


def _parse(name: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        code = f": `{error.text.strip()}`" if error.text else ""
        raise ConfigError(
            f"reward.name {name!r}: {path}, line {error.lineno}: {error.msg}{code}; correct the file"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.name {name!r}: {path} cannot be read as Python: {error}") from error


def _packages(statement: ast.stmt) -> list[str]:
    """The packages that a statement of the module certainly imports; imports in a try or an if are optional."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


def _is_there(package: str, folder: Path) -> bool:
    """Whether a package, or a file beside the reward's, can be imported; without importing it."""
    if (folder / f"{package}.py").is_file() or (folder / package).is_dir():
        return True
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: it is loaded already, and has no spec.
        return True


def _bound_names(module: ast.Module) -> Iterator[str]:
    """Every name that the module's own statements may bind, those in branches and loops included."""
    waiting: list[ast.AST] = list(module.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.alias):
            yield node.asname or node.name
        waiting += ast.iter_child_nodes(node)


def _is_open_ended(module: ast.Module) -> bool:
    used = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    used |= {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.alias)}
    return bool(used & OPEN_ENDED) or "*" in used
