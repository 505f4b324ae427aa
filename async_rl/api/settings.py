"""The settings of a run as Python gives them, and `Config`, which holds them."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pydantic import ValidationError

from async_rl.config import sections
from async_rl.config.file import config_error, parse_config
from async_rl.config.keys import explain_unknown
from async_rl.config.toml_text import toml_sections
from async_rl.errors import ConfigError

Tree = dict[str, Any]
"""Sections of a config; functions, classes and rows are in the places of their names and sources."""

SOURCE = "source"
"""The key of a section, or of a table in it, that names rows."""

PATHS = frozenset({"path", SOURCE, "teacher", "critic_path", "snapshot_dir"})
"""Keys with files and folders of this machine, or with names of the hub."""

MAY_BE_CODE = {
    *(("reward", "name"), ("rollout", "program"), ("algorithm", "name")),
    *(("parts", "name"), ("nodes", "function")),
}
"""Where a function or class may stand: a table, and its key."""


class Sections(TypedDict, total=False):
    """Of a config, beside those that are arguments of their own, by their names."""

    run: Mapping[str, Any]
    prompts: Mapping[str, Any]
    rollout: Mapping[str, Any]
    pool: Mapping[str, Any]
    publish: Mapping[str, Any]
    algorithm: Mapping[str, Any]
    pipeline: Mapping[str, Any]
    adapter: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    train: Mapping[str, Any]
    trainer: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    inference: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    tracking: Mapping[str, Any]
    cluster: Mapping[str, Any]


class Config(sections.Config):
    """All settings of a run: `async_rl.Config(run={"dir": "runs/mine"}, model={"path": "model"}, ...)`.

    Its sections are attributes (`config.train.iterations`); it cannot be changed.
    """

    if not TYPE_CHECKING:

        def __init__(self, **given: Any) -> None:
            """
            Raises:
                ConfigError: with one line per bad key, naming its value.
            """
            _require_values(given)
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise config_error(error, "async_rl.Config") from error

    def toml(self) -> str:
        """The settings that were given, as the file that `async-rl run` reads."""
        return toml_of(self)


def toml_of(config: sections.Config) -> str:
    return toml_sections(config.model_dump(exclude_unset=True))


def tree_of(
    config: sections.Config | None,
    given: Mapping[str, Any],
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    program: Any = None,
    out: Any = None,
) -> Tree:
    """One tree of the arguments of `train`: those of `given` are sections, and all replace the values of `config`.

    Raises:
        ConfigError: a section is unknown, or is no table.
    """
    tree: Tree = {} if config is None else config.model_dump(exclude_unset=True)
    for name, section in given.items():
        if name not in sections.Config.model_fields:
            raise ConfigError(f"unknown argument {name!r}: {explain_unknown(sections.Config, [name])}")
        if not isinstance(section, Mapping):
            raise ConfigError(
                f"{name} is {section!r:.200}: expected the keys of [{name}], as {name}={{'KEY': VALUE, ...}}"
            )
        tree[name] = {**tree.get(name, {}), **section}
    for key, value in (("model.path", model), ("prompts.source", data), ("rollout.program", program), ("run.dir", out)):
        section, _, name = key.partition(".")
        if isinstance(value, Mapping) and section == "model":
            tree[section] = {**tree.get(section, {}), **value}
        elif value is not None:
            tree[section] = {**tree.get(section, {}), name: value}
    if data is not None:
        tree["prompts"].pop("mixture", None)
    if reward is not None:
        tree["reward"] = {**_without_reward(tree.get("reward", {})), **_reward_section(reward)}
    return tree


def _without_reward(section: Mapping[str, Any]) -> Tree:
    return {key: value for key, value in section.items() if key not in ("name", "parts")}


def _reward_section(reward: Any) -> Tree:
    """`reward` is a name, a function, the keys of [reward], or a list of names and functions, which are added up."""
    if isinstance(reward, Mapping):
        return dict(reward)
    if isinstance(reward, list | tuple):
        return {"parts": [{"name": each} | _label_of(each) for each in reward]}
    return {"name": reward}


def _label_of(reward: Any) -> Tree:
    name = getattr(reward, "__name__", "")
    return {"label": name} if name.isidentifier() else {}


def places(tree: Tree) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """(container, its key or index, the names on the way) of every value below the sections; the container may be
    changed there. Lists and tables below are made new, so that those of the user stay as they are."""
    for name in tree:
        tree[name] = dict(tree[name])
        yield from _places_in(tree[name], (name,))


def _places_in(container: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        value, here = container[key], (*path, str(key))
        if key != SOURCE and isinstance(value, Mapping | list | tuple) and not isinstance(value, str):
            container[key] = value = dict(value) if isinstance(value, Mapping) else list(value)
            yield from _places_in(value, here)
        else:
            yield container, key, here


def may_be_code(path: Sequence[str]) -> bool:
    """Whether a function or class may stand at this place of a tree."""
    table = path[-3] if path[-2].isdigit() else path[-2]
    return (table, path[-1]) in MAY_BE_CODE


def absolute(value: str, prefix: str = "") -> str:
    """A file's or folder's name that holds whatever the working directory is; of what is not here as it was."""
    try:
        path = Path(value.removeprefix(prefix)).expanduser()
        return f"{prefix}{path.absolute()}" if path.exists() else value
    except (OSError, RuntimeError, ValueError):
        return value


def parsed(tree: Tree, what: str) -> sections.Config:
    """
    Raises:
        ConfigError: see `parse_config`.
    """
    if "dir" not in tree.get("run", {}):
        raise ConfigError("out is missing: name the folder of the run, out='runs/NAME'")
    if "prompts" not in tree or not {"source", "mixture"} & tree["prompts"].keys():
        raise ConfigError("data is missing: give a path, a list of rows, or a data set, data=[{'prompt': ...}, ...]")
    _require_values(tree)
    return parse_config(tree, source=what)


def _require_values(tree: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: one is nothing that the file of a config can hold, as an array.
    """
    toml_sections({name: section for name, section in tree.items() if isinstance(section, Mapping)})


def name_of(value: Any) -> str:
    """A function in a message."""
    return getattr(value, "__qualname__", None) or repr(value)[:200]


def signature_of(value: Any) -> inspect.Signature | None:
    """None of a function in C that has none."""
    try:
        return inspect.signature(value)
    except (TypeError, ValueError):
        return None
