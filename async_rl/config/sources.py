"""Where each value of a config comes from: a line of the file, an override, or the default; for `async-rl check`.

tomllib forgets lines, so the file is cut into its statements here, each of which tomllib reads alone.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.keys import keys_of
from async_rl.config.secrets import masked
from async_rl.config.sections import Config

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A key of the config, its resolved value with secrets masked, and where it comes from."""

    name: str
    value: Any
    source: str


def sourced_values(path: Path, config: Config, overrides: Sequence[str]) -> list[SourcedValue]:
    """Every key of the config in the order of its sections.

    Args:
        path: the file that `config` was read from.
        overrides: the words `--section.key=value` that it was read with.
    """
    lines = lines_of_keys(path.read_text(encoding="utf-8"))
    overridden = {_table_key(word.removeprefix("--").partition("=")[0]) for word in overrides}
    found = []
    for name, key in keys_of(Config).items():
        section = getattr(config, key.section)
        value = getattr(section, name.partition(".")[2])
        source = f"{path.name}:{lines[name]}" if name in lines else DEFAULT
        if name in overridden:
            # A key of a table may be overridden while the others are those of the file.
            source = "command line" if name not in lines else f"command line, {source}"
        found.append(SourcedValue(name, masked(name, value), source))
    return found


def lines_of_keys(text: str) -> Mapping[str, int]:
    """The line, from 1, of each key `section.name` in a TOML text that is valid; of a table the first line of it."""
    lines: dict[str, int] = {}
    header: tuple[str, ...] = ()
    for number, statement in _statements(text):
        tree = tomllib.loads(statement)
        is_header = statement.lstrip().startswith("[")
        paths = list(_paths(tree))
        if is_header:
            header = paths[0] if paths else header
            paths = [header]
        else:
            paths = [(*header, *path) for path in paths]
        for path in paths:
            if len(path) > 1:
                lines.setdefault(".".join(path[:2]), number)
            elif not is_header:
                # [train] written as one line, train = {...}, is reached through its keys.
                lines.setdefault(path[0], number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of each header and each key with its value, which may go on over several lines."""
    pending: list[str] = []
    first = 1
    # Not splitlines(), which also cuts at characters that a string may have.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not pending:
            first = number
        pending.append(line)
        statement = "\n".join(pending)
        try:
            tree = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        pending = []
        if tree:
            yield first, statement


def _paths(tree: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The dotted names in a statement: down to values, and to tables of more than two parts."""
    for key, value in tree.items():
        path = (*before, key)
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict) and inner and len(path) < 2:
            yield from _paths(inner, path)
        else:
            yield path


def _table_key(name: str) -> str:
    """The key of the config that an override sets: prompts.task_options of prompts.task_options.min_word_len."""
    return ".".join(name.split(".")[:2])
