"""Settings as TOML text: one value, or sections; for configs that async-rl writes."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A value as TOML: JSON's strings, numbers and truth values are TOML's; DEL has to be escaped.

    Raises:
        ConfigError: TOML has no such value.
    """
    if isinstance(value, Mapping):
        pairs = (f"{_toml_key(key)} = {toml_value(inner)}" for key, inner in value.items() if inner is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str | int | float):
        raise ConfigError(
            f"{value!r:.200} is a {type(value).__name__}, which a config cannot hold: give a number, a text, a truth "
            "value, a list or a table"
        )
    try:
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        text.encode()
    except ValueError as error:
        raise ConfigError(
            f"a {type(value).__name__} cannot be written: {error}; give a text in UTF-8, or a number"
        ) from error
    return text


def toml_sections(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A config's text; what is None is left out.

    Raises:
        ConfigError: TOML has no such value; names the key.
    """
    return "\n".join(f"[{name}]\n" + "".join(_lines_of(name, keys)) for name, keys in sections.items())


def _lines_of(section: str, keys: Mapping[str, Any]) -> Iterator[str]:
    for name, value in keys.items():
        try:
            if value is not None:
                yield f"{_toml_key(name)} = {toml_value(value)}\n"
        except ConfigError as error:
            raise ConfigError(f"{section}.{name}: {error}") from error


def _toml_key(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"the key {key!r:.200} is a {type(key).__name__}, but keys are texts: write it as one")
    return key if BARE_KEY.fullmatch(key) else toml_value(key)
