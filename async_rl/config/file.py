"""Reads a config: a TOML file with overrides, or nested dicts; errors name the config's own keys."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from async_rl.config.keys import explain_unknown, find_key, keys_of, read_value, set_dotted
from async_rl.config.secrets import masked, masked_text
from async_rl.config.sections import Config
from async_rl.config.texts import said_of
from async_rl.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file and applies overrides such as `--train.iterations=10`, in the form that
    `programs/command_line.py` produces.

    The value of a text key is used unchanged; others are read as TOML or JSON.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, or a value is out of range.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {str(path)!r}: {error.strerror}; give the path of a TOML file"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not valid TOML: {error}; correct it there") from error
    for word in overrides:
        if not _is_utf8(word):
            raise ConfigError(f"override {word!r} is not UTF-8: name files and folders in UTF-8")
        name, equals, text = word.removeprefix("--").partition("=")
        assert word.startswith("--") and equals, f"override {word!r} is not --section.key=VALUE"
        key = find_key(Config, name)
        try:
            set_dotted(tree, name, key.read(text) if key else read_value(text))
        except ValueError as error:
            raise ConfigError(f"override --{name}: {error}") from error
    return parse_config(tree, source=str(path))


def _is_utf8(word: str) -> bool:
    """Not where an argument has bytes that Python could not decode."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_config(tree: dict[str, Any], source: str) -> Config:
    """Validates a config given as nested dicts; errors name `source`.

    Raises:
        ConfigError: with one line per bad key, naming its value.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, source) from error


def config_error(error: ValidationError, source: str) -> ConfigError:
    """The errors of a config, with one line per bad key."""
    lines = [_explain(item) for item in error.errors() if not _only_follows(item, error.errors())]
    return ConfigError(masked_text(f"{source}: " + "\n".join(lines)))


def _only_follows(item: ErrorDetails, others: Sequence[ErrorDetails]) -> bool:
    """Whether a list is too short because some of its entries are wrong, each of which is named."""
    loc = item["loc"]
    return item["type"] == "too_short" and any(o["loc"][: len(loc)] == loc != o["loc"] for o in others)


def _explain(item: Any) -> str:
    """The message for one error of a config: the key, its value, the expected value and the key's meaning."""
    loc: tuple[str | int, ...] = item["loc"]
    name = ".".join(str(part) for part in loc)
    given = masked(name, item["input"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {name!r} (value {given!r}): {explain_unknown(Config, loc)}"
    if item["type"] == "missing" and len(loc) == 1:
        needed = [key.name for key in keys_of(Config).values() if key.section == name and key.default is None]
        return f"missing section [{name}]: set {', '.join(needed)}"
    key = find_key(Config, name)
    meaning = f"; {name} is: {key.description}" if key and key.description else ""
    if item["type"] == "missing":
        way = f"in [{key.section}] or as --{name} VALUE" if key else "there"
        return f"missing key {name!r}: it has no default; set it {way}{meaning}"
    # Our own validators have complete messages.
    message = said_of(item)
    return f"{name}: {message} (got {given!r}){meaning}" if key or len(loc) > 1 else message
