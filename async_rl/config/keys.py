"""The keys of a config, read from its pydantic models: dotted names, their values, and the nearest key of a typo."""

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_rl.config.other_names import translated

CLOSE = 0.6
"""Similarity from which a key is suggested for a misspelt one; difflib's own default."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `name` is dotted, `takes` describes its values; `default` is as in TOML, None for a required key.

    `is_text` keys take a word of the command line unchanged, others read it as TOML or JSON; `is_table` keys contain
    user-defined keys.
    """

    name: str
    section: str
    takes: str
    default: str | None
    description: str
    is_text: bool
    is_table: bool

    def read(self, text: str) -> Any:
        """A value from the command line; text that is neither TOML nor JSON is left to the model's validation."""
        return text if self.is_text else read_value(text)


@cache
def keys_of(model: type[BaseModel]) -> Mapping[str, Key]:
    """Every key of a config of sections, by its dotted name, in the order of the model."""
    found: dict[str, Key] = {}
    for section, field in model.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel), section
        for name, setting in field.annotation.model_fields.items():
            found[f"{section}.{name}"] = _key(section, name, setting)
    return found


@cache
def options_of(model: type[BaseModel], table: Key) -> Mapping[str, Key]:
    """The keys in a table of which a section of its own says what it has, by their dotted names; none in others."""
    section, _, name = table.name.partition(".")
    kind = model.model_fields[section].annotation.model_fields[name].annotation  # type: ignore[union-attr]
    if not _is_section(kind):
        return {}
    return {f"{table.name}.{key}": _key(table.name, key, setting) for key, setting in kind.model_fields.items()}


def option_keys(model: type[BaseModel]) -> dict[str, Key]:
    """Those of `options_of` of all tables."""
    return {name: key for table in keys_of(model).values() for name, key in options_of(model, table).items()}


def find_key(model: type[BaseModel], name: str) -> Key | None:
    """The key called `name`, or the table that contains the key `name`, such as prompts.task_options.min_word_len."""
    keys = keys_of(model)
    if name in keys:
        return keys[name]
    table = keys.get(".".join(name.split(".")[:2]))
    if table and (options := options_of(model, table)):
        return options.get(name)
    return Key(name, table.section, "VALUE", None, "", False, False) if table and table.is_table else None


def explain_unknown(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """A suggestion for the unknown key at `path`: what another trainer's setting is here, or the nearest key; and the
    keys of its section."""
    name = ".".join(map(str, path))
    keys = keys_of(model)
    table = keys.get(".".join(map(str, path[:2])))
    if any(isinstance(part, int) for part in path) or (table and options_of(model, table)):
        return _explain_in_table(model, path)
    section = name.split(".")[0]
    in_section = [key.name for key in keys.values() if key.section == section]
    near = nearest(name, keys) or _same_last_part(name, keys)
    if in_section or "." not in name:
        # A key of exactly this name in another section is more likely meant than one that is only similar.
        near = next((key for key in keys if key.endswith("." + name.rpartition(".")[2])), near)
    meant = f"did you mean {near!r}? " if near else "correct its spelling or remove it; "
    last = str(path[-1])
    is_elsewhere = near is not None and near.endswith(f".{last}")
    if (other := translated(name) or (None if is_elsewhere else translated(last))) is not None:
        meant = f"{other}; "
    if in_section:
        return f"{meant}[{section}] has {', '.join(key.partition('.')[2] for key in in_section)}"
    sections = dict.fromkeys(key.section for key in keys.values())
    if "." not in name and (near_section := nearest(section, sections)) is not None:
        meant = f"did you mean [{near_section}]? "
    return f"{meant}the sections are {', '.join(sections)}"


def _explain_in_table(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """The same for a key of a table below a section, such as evaluation.sets.0.nmae or rollout.options.max_trns."""
    annotation: Any = model
    for part in path[:-1]:
        annotation = get_args(annotation)[0] if isinstance(part, int) else annotation.model_fields[part].annotation
    names = list(annotation.model_fields)
    near = nearest(str(path[-1]), names)
    meant = f"did you mean {near!r}? " if near else "correct its spelling or remove it; "
    where = [str(part) for part in path[:-1] if not isinstance(part, int)]
    return f"{meant}{'each of ' if len(where) < len(path) - 1 else ''}{'.'.join(where)} has {', '.join(names)}"


def nearest(name: str, names: Sequence[str] | Mapping[str, Any]) -> str | None:
    """The most similar of `names`; None if none is similar."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=CLOSE)
    return found[0] if found else None


def read_value(text: str) -> Any:
    """Text as TOML, else as JSON, else unchanged."""
    try:
        read = tomllib.loads(f"value = {text}")
        if read.keys() == {"value"}:
            return read["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def as_toml(value: Any, default: Callable[[Any], Any] = str) -> str:
    """A value as a config has it: JSON's values are TOML's, apart from infinity; `default` converts what JSON lacks."""
    return "inf" if value == math.inf else json.dumps(value, default=default, ensure_ascii=False)


def set_dotted(tree: dict[str, Any], name: str, value: Any) -> None:
    """Sets the key `name` of a config as nested dicts.

    Raises:
        ValueError: a parent of the key is a value instead of a table.
    """
    *parents, last = name.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ValueError(f"{parent!r} is a value, not a section")
    node[last] = value


def _same_last_part(name: str, keys: Mapping[str, Key]) -> str | None:
    """The key of another section with the same or a similar name: learning_rate, train.learning_rate."""
    last_parts = {key.name.rpartition(".")[2]: key.name for key in keys.values()}
    near = nearest(name.rpartition(".")[2], last_parts)
    return last_parts[near] if near else None


def _key(section: str, name: str, setting: FieldInfo) -> Key:
    default = None
    if not setting.is_required():
        default = default_of(setting)
    kinds = kinds_of(setting.annotation)
    return Key(
        f"{section}.{name}",
        section,
        _takes(setting.annotation),
        default,
        setting.description or "",
        is_text=kinds <= {str, Path},
        is_table=dict in kinds or _is_section(setting.annotation),
    )


def default_of(setting: FieldInfo) -> str:
    """As TOML; a table of options is empty by default."""
    return "{}" if _is_section(setting.annotation) else as_toml(setting.get_default(call_default_factory=True))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def kinds_of(annotation: Any) -> set[Any]:
    """The plain types that values of `annotation` may have, without None."""
    origin = get_origin(annotation)
    if origin is Literal:
        return {type(choice) for choice in get_args(annotation)}
    if origin in (Union, UnionType):
        return {kind for part in get_args(annotation) if part is not type(None) for kind in kinds_of(part)}
    return {origin or annotation}


def _takes(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(choice if isinstance(choice, str) else json.dumps(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(_takes(part) for part in get_args(annotation) if part is not type(None))
    if _is_section(annotation):
        return "TABLE"
    names = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", tuple: "LIST", dict: "TABLE"}
    return names[get_origin(annotation) or annotation]
