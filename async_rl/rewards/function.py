"""From a reward's name to its function. Runs in the trainer's process and in the workers, and imports nothing heavy."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError

PREFIX = "python:"

RewardFunction = Callable[..., Any]
"""function(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> one float per response"""


def load_function(name: str) -> RewardFunction:
    """The function of a built-in reward or of `python:path/to/file.py:function`.

    Raises:
        ConfigError: the file or function does not exist, or loading it failed (with its traceback).
    """
    if not name.startswith(PREFIX):
        function: RewardFunction = importlib.import_module(f"async_rl.rewards.{name}").score
        return function
    file, colon, attribute = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ConfigError(f"reward.name {name!r}: no such file {file!r}; write {PREFIX}path/to/file.py:function")
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
    # Dataclasses and pickles of the file look their module up by name, and the file may import its neighbours.
    sys.modules[module_name] = module
    sys.path.append(str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward.name {name!r}: loading {path} failed:\n{traceback.format_exc()}") from error
    return module
