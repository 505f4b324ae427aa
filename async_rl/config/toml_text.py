"""Settings as TOML text: one value, or sections; for configs that async-rl writes."""

import json
import re
from collections.abc import Mapping
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
    if isinstance(value, Path):
        value = str(value)
    try:
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    except TypeError as error:
        raise ConfigError(
            f"{value!r:.200} is a {type(value).__name__}, which a config cannot hold: give a number, a text, a truth "
            "value, a list or a table"
        ) from error


def toml_sections(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A config's text; what is None is left out."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{_toml_key(key)} = {toml_value(v)}\n" for key, v in keys.items() if v is not None)
        for name, keys in sections.items()
    )


def _toml_key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else toml_value(key)
