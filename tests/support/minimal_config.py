"""A config with the keys that have no default, and no other keys."""

import tomllib
from typing import Any

from async_rl.config.file import parse_config
from async_rl.config.sections import Config

MINIMAL = """
[run]
dir = "runs/x"
[model]
path = "some/model"
[prompts]
source = "rows.jsonl"
prompts_per_batch = 4
[reward]
name = "math"
[train]
iterations = 3
"""


def minimal_tree() -> dict[str, Any]:
    """The same as nested dicts, to be changed."""
    return tomllib.loads(MINIMAL)


def config_of(**sections: dict[str, Any]) -> Config:
    """With these settings besides, `config_of(train={"exact": True})`."""
    tree = minimal_tree()
    for section, settings in sections.items():
        tree.setdefault(section, {}).update(settings)
    return parse_config(tree, "here")
