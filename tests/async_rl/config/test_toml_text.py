import tomllib
from pathlib import Path

import pytest

from async_rl.config.toml_text import toml_sections
from async_rl.errors import ConfigError


def test_sections_are_read_as_they_were() -> None:
    tree = {
        "run": {"dir": 'a "quoted" \\ path\x7f', "seed": 3},
        "reward": {
            "parts": [{"name": "exact", "weight": 0.5}],
            "options": {"a key": {"nested": [True, 1e-5, float("inf"), float("-inf")]}},
        },
    }
    assert tomllib.loads(toml_sections(tree)) == tree


def test_what_is_none_is_left_out_and_a_path_is_a_text() -> None:
    assert tomllib.loads(toml_sections({"run": {"dir": Path("a"), "seed": None}})) == {"run": {"dir": "a"}}


@pytest.mark.parametrize(
    "value", [object(), None, b"x", "\ud800", {3: "a"}, {"\ud800": 1}, 10**5000], ids=lambda value: type(value).__name__
)
def test_what_no_config_can_hold_is_named_with_its_key(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^reward\.options: .*(which a config cannot hold|cannot be written|keys are)"
    ):
        toml_sections({"reward": {"options": {"key": [value]}}})
