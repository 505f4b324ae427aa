"""The settings of a run as a model card shows them: as TOML, without secrets and without the paths of its machines."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.config.secrets import MASK, masked
from async_rl.config.sections import Config

SHOWN = ("model", "prompts", "rollout", "reward", "algorithm", "optimizer", "critic", "train", "trainer")
"""Sections that decide what was trained; others name hosts, ports and directories."""

PROSE = ("system_prompt", "stop")
"""Keys whose texts contain no paths."""

_SECRET_KEY = re.compile(r"token|secret|passw(?:or)?d|api[-_]?key|credential|authorization", re.IGNORECASE)
_QUERY = re.compile(r"(://[^\s?#]*)[?#]\S+")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_FOLDERS = re.compile(r"(^|[\s=:'\"(])~?/(?:[^/\s:'\"]+/)+")


def settings_toml(config: Config) -> str:
    """The settings that differ from their defaults, of the sections `SHOWN` and `run.seed`."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    lines = [f"run.seed = {config.run.seed}"]
    for section in SHOWN:
        lines += [f"{section}.{key} = {_toml(shown(value, key))}" for key, value in _values(tree.get(section, {}))]
    return "\n".join(lines)


def shown(value: Any, key: str = "") -> Any:
    """A value of a config without secrets and without folders of absolute paths; `key` is its name."""
    if isinstance(value, dict):
        return {name: shown(each, name) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [shown(each, key) for each in value]
    if not isinstance(value, str):
        return value
    if _SECRET_KEY.search(key):
        return MASK
    value = _QUERY.sub(rf"\1?{MASK}", masked(key, value))
    return value if key in PROSE else _FOLDERS.sub(r"\1.../", value)


def _values(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in section.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's other values are TOML's; what a reader cannot see is escaped.
    return "".join(map(_visible, json.dumps(value, ensure_ascii=False)))


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _toml(name)


def _visible(sign: str) -> str:
    if sign.isprintable():
        return sign
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"
