"""Loads a reward's function by the reward's name, and reads the function's traits.

Functions are loaded in the workers only: side effects of loading a user's file must not affect the trainer.
"""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.sections import RewardSection
from async_rl.errors import ConfigError
from async_rl.rewards.base import CORRECT_AT, is_reward

PREFIX = "python:"

RewardFunction = Callable[..., Any]
"""function(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> one float per response"""


@dataclass(frozen=True, slots=True)
class Traits:
    """A reward function's properties: whether it is asynchronous, and from which reward on responses are correct."""

    is_async: bool
    correct_at: float | None

    @classmethod
    def of(cls, function: RewardFunction) -> "Traits":
        """The traits of a loaded function.

        Raises:
            ConfigError: its `correct_at` is not a finite number.
        """
        threshold = getattr(function, CORRECT_AT, None)
        if threshold is not None and not (isinstance(threshold, int | float) and is_reward(threshold)):
            raise ConfigError(f"its {CORRECT_AT} is {threshold!r}: expected a number, the least reward that is correct")
        return cls(is_async(function), None if threshold is None else float(threshold))


def find_file(name: str) -> tuple[Path, str]:
    """The file and the function's name of `python:path/to/file.py:function`.

    Raises:
        ConfigError: there is no such file.
    """
    file, colon, attribute = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ConfigError(f"reward.name {name!r}: no such file {file!r}; write {PREFIX}path/to/file.py:function")
    return path, attribute


def load_function(config: RewardSection) -> RewardFunction:
    """The function of a built-in reward or of `python:path/to/file.py:function`.

    Raises:
        ConfigError: the file or function does not exist, or loading it failed (with its traceback).
    """
    name = config.name
    if not name.startswith(PREFIX):
        module = importlib.import_module(f"async_rl.rewards.{name}")
        function: RewardFunction = module.make_score(config) if hasattr(module, "make_score") else module.score
        return function
    path, attribute = find_file(name)
    module = _load_file(path, name)
    found: RewardFunction | None = getattr(module, attribute, None)
    if found is None or not callable(found):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(f"reward.name {name!r}: {path} has no function {attribute!r}; it has {functions}")
    return found


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _load_file(path: Path, name: str) -> Any:
    module_name = f"async_rl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.name {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up by name, and the file may import files beside it, or
    # packages of the working directory.
    sys.modules[module_name] = module
    sys.path += [str(path.parent.resolve()), str(Path.cwd())]
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # sys.exit() at module level is an error like any other
        raise ConfigError(f"reward.name {name!r}: loading {path} failed:\n{_from(path, error)}") from error
    return module


def _from(path: Path, error: BaseException) -> str:
    """The traceback from the file's own code on: the frames before it are ours and the importer's."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
