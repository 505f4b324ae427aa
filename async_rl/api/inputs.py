"""What a run gets from Python, as files in its folder: rows as JSON lines, functions by value; for `train` and others.

A config then names them as any other files, so every command finds them again, from the command line too.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Signature, isclass
from pathlib import Path
from typing import Any

from async_rl.api.settings import PATHS, SOURCE, Tree, absolute, may_be_code, name_of, places, signature_of
from async_rl.checks.preflight.reward_rows import require_columns_of
from async_rl.config.reward_section import BUILT_IN
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.signatures import form_of
from async_rl.shared.files import named_write_errors
from async_rl.shared.programs.by_value import Pickled, pickled, setting_of
from async_rl.shared.programs.user_file import PREFIX, is_async

FOLDER = "inputs"
"""In the folder of a run."""

CONFIG = "run.toml"


class Inputs:
    """The files of one run in `folder`: found by `take`, and written by `write`, when all is known to be valid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[Path, Any] = {}
        self._code: dict[Path, tuple[str, Pickled]] = {}
        self._rewards: dict[str, Signature] = {}

    def take(self, tree: Tree) -> Tree:
        """The same tree with the names of files for rows and functions, and with whole paths.

        Raises:
            ConfigError: rows or a function cannot be used; nothing is written yet.
        """
        for container, key, path in places(tree):
            value = container[key]
            setting = ".".join(path)
            if isinstance(value, str):
                if value.startswith(PREFIX):
                    file, _, name = value.removeprefix(PREFIX).rpartition(":")
                    container[key] = f"{PREFIX}{absolute(file)}:{name}" if file else value
                elif path[-1] in PATHS:
                    container[key] = absolute(value)
            elif isinstance(value, Path):
                container[key] = absolute(str(value))
            elif path[-1] == SOURCE and value is not None:
                container[key] = str(self._add_rows(setting, value))
            elif may_be_code(path) and value is not None:
                container[key] = self._add_code(setting, path[0], value)
        return tree

    def write(self, config: Config | None) -> None:
        """Args:
            config: of the run, with whose rows the parameters of its rewards are compared.

        Raises:
            ConfigError: a row cannot be written, or no row has a column that a reward needs.
            WriteFailed: a file cannot be written.
        """
        with named_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        for path, rows in self._rows.items():
            write_rows(path, rows)
        for path, (setting, value) in self._code.items():
            value.write(setting, path)
        if config is not None:
            for name, signature in self._rewards.items():
                require_columns_of(config, name, signature, trains=True)

    def _add_rows(self, setting: str, rows: Any) -> Path:
        require_rows(setting, rows)
        name = "data" if setting == "prompts.source" else setting.removesuffix(f".{SOURCE}").replace(".", "_")
        path = self.folder.absolute() / f"{name}.jsonl"
        self._rows[path] = rows
        return path

    def _add_code(self, setting: str, kind: str, value: Any) -> str:
        _CHECKS[kind](setting, value)
        number = sum(path.stem.startswith(kind) for path in self._code)
        path = self.folder.absolute() / f"{kind}{f'_{number}' if number else ''}.py"
        self._code[path] = setting, pickled(f"{setting} {name_of(value)}", value)
        name = setting_of(path)
        if kind == "reward" and (signature := signature_of(value)) is not None:
            self._rewards[name] = signature
        return name


def _require_reward(setting: str, value: Any) -> None:
    if not callable(value):
        raise ConfigError(
            f"{setting} is {value!r:.200}: expected a function, the name of a built-in reward ({', '.join(BUILT_IN)}), "
            f"or {PREFIX}path/to/file.py:function"
        )
    if (signature := signature_of(value)) is not None:
        try:
            form_of(signature)
        except ValueError as error:
            raise ConfigError(f"{setting} {name_of(value)}: {error}; write it in one of these forms") from error


def _require_program(setting: str, value: Any) -> None:
    if not callable(value) or not is_async(value):
        raise ConfigError(
            f"{setting} is {name_of(value)}: expected an asynchronous function, `async def rollout(prompt, policy)`, "
            f"{PREFIX}path/to/file.py:function, or command:PROGRAM ARGUMENTS"
        )


def _require_algorithm(setting: str, value: Any) -> None:
    if not isclass(value):
        raise ConfigError(f"{setting} is {name_of(value)}: expected a class, or the name of an algorithm")


def _require_node(setting: str, value: Any) -> None:
    if not callable(value):
        raise ConfigError(f"{setting} is {value!r:.200}: expected a function, or {PREFIX}path/to/file.py:function")


_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    "reward": _require_reward,
    "rollout": _require_program,
    "algorithm": _require_algorithm,
    "pipeline": _require_node,
}


def require_rows(setting: str, rows: Any) -> None:
    """Checks what is given for rows: several, of a known number, each a mapping.

    Raises:
        ConfigError: it is something else, or empty.
    """
    remedy = "give a path, a list of rows, or a data set of the `datasets` package"
    if isinstance(rows, Mapping):
        names = ", ".join(map(repr, list(rows)[:5]))
        raise ConfigError(f"{setting} is a mapping with {names}: give one split of it, data[SPLIT], or [row] for a row")
    if hasattr(rows, "to_dict") and hasattr(rows, "iterrows"):
        raise ConfigError(f"{setting} is a table of pandas: give table.to_dict('records')")
    if not hasattr(rows, "__iter__"):
        raise ConfigError(f"{setting} is {rows!r:.200} ({type(rows).__name__}): {remedy}")
    try:
        num_rows = len(rows)
    except TypeError as error:
        raise ConfigError(f"{setting} is a {type(rows).__name__}, which has no length: give list(...) of it") from error
    if not num_rows:
        raise ConfigError(f"{setting} has no rows: {remedy}")


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes rows as JSON lines, one at a time.

    Raises:
        ConfigError: one is no mapping, or has a value that JSON cannot hold; the file is as it was.
        WriteFailed: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with named_write_errors(path):
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(_lines(path.stem, rows))
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _lines(what: str, rows: Iterable[Any]) -> Iterator[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{what}, row {number} (from 0) is {row!r:.200} ({type(row).__name__}): expected a dictionary, such as "
                "{'prompt': ..., 'answer': ...}"
            )
        try:
            yield json.dumps(dict(row), default=_plain) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{what}, row {number} (from 0){_bad_column(row)}: {error}; leave it out") from error


def _bad_column(row: Mapping[str, Any]) -> str:
    for name, value in row.items():
        try:
            json.dumps({name: value}, default=_plain)
        except (TypeError, ValueError, RecursionError):
            return f", column {name!r} ({type(value).__name__})"
    return ""


def _plain(value: Any) -> Any:
    """A value as JSON has it: numbers and arrays of numpy and torch, and dates.

    Raises:
        TypeError: it has none.
    """
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r:.200} cannot be written as JSON")
