"""A config with the keys that have no default, and no other keys."""

import tomllib
from typing import Any

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
