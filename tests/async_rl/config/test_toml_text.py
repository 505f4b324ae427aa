import tomllib
from pathlib import Path

import pytest

from async_rl.config.toml_text import toml_sections, toml_value
from async_rl.errors import ConfigError


def test_sections_are_read_as_they_were() -> None:
    tree = {
        "run": {"dir": 'a "quoted" \\ path\x7f', "seed": 3},
        "reward": {"parts": [{"name": "exact", "weight": 0.5}], "options": {"a key": {"nested": [True, 1e-5]}}},
    }
    assert tomllib.loads(toml_sections(tree)) == tree


def test_what_is_none_is_left_out_and_a_path_is_a_text() -> None:
    assert tomllib.loads(toml_sections({"run": {"dir": Path("a"), "seed": None}})) == {"run": {"dir": "a"}}


def test_what_no_config_can_hold_is_named() -> None:
    with pytest.raises(ConfigError, match=r"is a object, which a config cannot hold"):
        toml_value({"key": [object()]})
