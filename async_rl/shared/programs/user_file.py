"""Loads a function or class from a user's file, named `python:path/to/file.py:name` in a setting.

Rewards and rollouts are loaded in processes of their own only: side effects of loading them must not affect the
trainer. An algorithm is part of the trainer, and loaded there.
"""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError

PREFIX = "python:"

PACKAGE = Path(__file__).resolve().parents[2]

MAX_TRACEBACK = 20_000
"""Characters of a traceback: an error may quote a whole page, or megabytes."""


def find_file(setting: str, name: str) -> tuple[Path, str]:
    """The file and the function's name of `python:path/to/file.py:function`, the value of `setting`.

    Raises:
        ConfigError: there is no such file.
    """
    file, colon, attribute = name.removeprefix(PREFIX).rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise ConfigError(f"{setting} {name!r}: no such file {file!r}; write {PREFIX}path/to/file.py:function")
    return path, attribute


def file_identity(setting: str, name: str) -> str:
    """A text that changes with the file; it does not cover modules that the file imports, and services that it calls.

    Raises:
        ConfigError: there is no such file.
    """
    path, function = find_file(setting, name)
    return f"{function} in a file with sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def load_from_file(setting: str, name: str) -> Callable[..., Any]:
    """The function of `python:path/to/file.py:function`.

    Raises:
        ConfigError: the file or function does not exist, or loading it failed (with its traceback).
    """
    path, attribute = find_file(setting, name)
    module = _load(setting, name, path)
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    if found is None or not callable(found):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(f"{setting} {name!r}: {path} has no function {attribute!r}; it has {functions}")
    return found


def load_class_from_file(setting: str, name: str) -> type[Any]:
    """The class of `python:path/to/file.py:Class`.

    Raises:
        ConfigError: as `load_from_file`.
    """
    path, attribute = find_file(setting, name)
    module = _load(setting, name, path)
    found = getattr(module, attribute, None)
    if not inspect.isclass(found):
        classes = sorted(key for key, value in vars(module).items() if inspect.isclass(value))
        raise ConfigError(f"{setting} {name!r}: {path} has no class {attribute!r}; it has {classes}")
    return found


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def traceback_from(path: Path, error: BaseException) -> str:
    """The traceback from the file's own code on: the frames before it are ours and the importer's."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve() != path.resolve():
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def traceback_of_user(error: BaseException) -> str:
    """The traceback from the first frame that is not ours; of an error in our own code all of it. Without its middle,
    if it is so long that nobody reads it."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).resolve().is_relative_to(PACKAGE):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    half = MAX_TRACEBACK // 2
    return text if len(text) <= MAX_TRACEBACK else f"{text[:half]}\n[...]\n{text[-half:]}"


def _load(setting: str, name: str, path: Path) -> Any:
    module_name = f"async_rl_{setting.partition('.')[0]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting} {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up by name, and the file may import files beside it, or
    # packages of the working directory.
    sys.modules[module_name] = module
    sys.path += [str(path.parent.resolve()), str(Path.cwd())]
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # sys.exit() at module level is an error like any other
        raise ConfigError(f"{setting} {name!r}: loading {path} failed:\n{traceback_from(path, error)}") from error
    return module
