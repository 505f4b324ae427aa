"""Checks from the text of users' files that they have the functions and classes that settings name.

Nothing of them is executed: errors during the loading of a file are reported by the process that runs it.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.pipeline_section import NODE, PipelineSection
from async_rl.config.rollout_section import SINGLE_TURN, RolloutSection
from async_rl.errors import ConfigError
from async_rl.shared.programs.parts import require_part
from async_rl.shared.programs.renderer_names import require_renderer
from async_rl.shared.programs.user_command import COMMAND, split_command

PREFIX = "python:"

OPEN_ENDED = {"exec", "globals", "setattr", "vars", "__getattr__"}
"""Code that uses one of these may give a module names that its text does not show."""


def require_algorithm(config: AlgorithmSection) -> None:
    """Checks that a user's own algorithm is a class of its file.

    Raises:
        ConfigError: it is not; names the line where possible.
    """
    if config.is_own:
        require_class("algorithm.name", config.name)


def require_nodes(config: PipelineSection) -> None:
    """Checks that the nodes of the pipeline are functions of their files, and take what they read.

    Raises:
        ConfigError: one is not, or does not; names the file and, if possible, the line.
    """
    for node in config.nodes:
        definition = require_function(NODE, node.function)
        if definition is None or definition.decorator_list:
            continue
        try:
            signature_of(definition).bind(**dict.fromkeys(node.reads))
        except TypeError as error:
            raise ConfigError(
                f"{NODE} {node.function!r}: line {definition.lineno}: it is called with what pipeline.nodes "
                f"{node.name!r} reads, {', '.join(node.reads)}: {error}; give the function these arguments"
            ) from error


def require_program(config: RolloutSection) -> None:
    """Checks `rollout.program` and `rollout.options.renderer`.

    Raises:
        ConfigError: there is no such program, named with its file and, if possible, the line; or no such renderer.
    """
    if config.program == SINGLE_TURN:
        return
    if config.program.startswith(COMMAND):
        split_command("rollout.program", config.program)
        require_part("gateway")
    elif config.program.startswith(PREFIX):
        definition = require_function("rollout.program", config.program)
        if definition is not None and not definition.decorator_list:
            _require_async(config.program, definition)
    else:
        raise ConfigError(
            f"rollout.program is {config.program!r}: expected {SINGLE_TURN}, {PREFIX}path/to/file.py:function, or "
            f"{COMMAND}PROGRAM ARGUMENTS"
        )
    require_renderer(config.options.renderer)


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


def require_function(setting: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Checks that `name`, the value of `setting`, is a function of a file whose imports can be found.

    Returns:
        Its definition, if the module has one of this name, and binds it to nothing else.

    Raises:
        ConfigError: it is not; names the file and, if possible, the line.
    """
    module = _require_file(setting, name, "function")
    definitions = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    _require_name(setting, name, module, "function", [definition.name for definition in definitions])
    named = name.rpartition(":")[2]
    found = [definition for definition in definitions if definition.name == named]
    is_only_one = list(_bound_names(module)).count(named) == len(found) == 1
    return found[0] if is_only_one and not _is_open_ended(module) else None


def signature_of(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """The parameters of a function as its text has them; a default stands for any."""
    given = definition.args
    first, others = len(given.posonlyargs), [*given.posonlyargs, *given.args]
    num_needed = len(others) - len(given.defaults)
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY)
    parameters = [
        Parameter(each.arg, kinds[i < first], default=Parameter.empty if i < num_needed else None)
        for i, each in enumerate(others)
    ]
    parameters += [Parameter(each.arg, Parameter.VAR_POSITIONAL) for each in (given.vararg,) if each]
    parameters += [
        Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [Parameter(each.arg, Parameter.VAR_KEYWORD) for each in (given.kwarg,) if each]
    return Signature(parameters)


def require_class(setting: str, name: str) -> None:
    """Likewise for a class.

    Raises:
        ConfigError: it is not; names the file and, if possible, the line.
    """
    module = _require_file(setting, name, "Class")
    classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    _require_name(setting, name, module, "class", classes)


def _require_file(setting: str, name: str, example: str) -> ast.Module:
    """The parsed file of `name`, whose certain imports can be found."""
    file, colon, _ = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ConfigError(
            f"{setting} is {name!r}, but there is no file {file!r}: write {PREFIX}path/to/file.py:{example}"
        )
    module = _parse(setting, name, path)
    for statement in module.body:
        for package in _packages(statement):
            if not _is_there(package, path.parent):
                raise ConfigError(
                    f"{setting} {name!r}: {file}, line {statement.lineno}: there is no module {package!r}; "
                    "install it, or correct the file"
                )
    return module


def _require_name(setting: str, name: str, module: ast.Module, kind: str, there: list[str]) -> None:
    file, _, named = name.removeprefix(PREFIX).rpartition(":")
    if named not in set(_bound_names(module)) and not _is_open_ended(module):
        raise ConfigError(f"{setting} {name!r}: {file} has no {kind} {named!r}; it has {there}")


def _parse(setting: str, name: str, path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        code = f": `{error.text.strip()}`" if error.text else ""
        raise ConfigError(
            f"{setting} {name!r}: {path}, line {error.lineno}: {error.msg}{code}; correct the file"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} {name!r}: {path} cannot be read as Python: {error}") from error


def _packages(statement: ast.stmt) -> list[str]:
    """The packages that a statement of the module certainly imports; imports in a try or an if are optional."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


def _is_there(package: str, folder: Path) -> bool:
    """Whether a package, or a file beside the named one, can be imported; without importing it."""
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
