"""A config from a file and overrides: what is wrong in it is said in its own keys, for every key."""

from pathlib import Path

import pytest

from async_rl.config.file import load_config, parse_config
from async_rl.config.keys import Key, keys_of
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support.minimal_config import MINIMAL, minimal_tree

KEYS = keys_of(Config)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_value_of_no_kind_is_named_by_its_key_with_its_meaning(key: Key) -> None:
    bad = minimal_tree()
    bad.setdefault(key.section, {})[key.name.partition(".")[2]] = {"no": ["such", "value"]}
    if key.is_table:
        return
    with pytest.raises(ConfigError) as caught:
        parse_config(bad, "here.toml")
    said = str(caught.value)
    assert said.startswith("here.toml: ") and f"{key.name}" in said and key.description in said


@pytest.mark.parametrize("key", [key for key in KEYS.values() if key.default is None], ids=lambda key: key.name)
def test_a_required_key_that_is_missing_is_named_and_so_is_its_section(key: Key) -> None:
    without = minimal_tree()
    del without[key.section][key.name.partition(".")[2]]
    with pytest.raises(
        ConfigError, match=rf"missing key '{key.name}': .* set it in .{key.section}. or as --{key.name} VALUE"
    ):
        parse_config(without, "here.toml")
    del without[key.section]
    with pytest.raises(ConfigError, match=rf"missing section \[{key.section}\]: set .*{key.name}"):
        parse_config(without, "here.toml")


def test_a_key_that_an_entry_of_a_list_lacks_is_no_option_of_the_command() -> None:
    with pytest.raises(ConfigError, match=r"missing key 'pipeline.nodes.0.function': it has no default; set it there$"):
        parse_config(minimal_tree() | {"pipeline": {"nodes": [{"name": "a", "reads": ["b"]}]}}, "here.toml")


def test_all_that_is_wrong_is_said_at_once() -> None:
    bad = minimal_tree() | {"nothing": {"x": 1}}
    bad["train"] = {"iterations": 0, "itertions": 3}
    with pytest.raises(ConfigError) as caught:
        parse_config(bad, "here.toml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("train.iterations: " in line and "(got 0)" in line for line in lines)
    assert any("unknown key 'train.itertions' (value 3): did you mean 'train.iterations'?" in line for line in lines)
    assert any("unknown key 'nothing'" in line for line in lines)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a = ", b"[a]\n[a]\n", b"a = 1\na = 2", b"\x00"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.toml' is not valid TOML: .*; correct it there"):
        load_config(path)


@pytest.mark.parametrize("place", ["", "missing.toml", "missing/missing.toml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*; give the path of a TOML file"):
        load_config(tmp_path / place)


def test_overrides_are_read_as_toml_and_text_keys_take_their_words_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    overrides = [
        "--train.iterations=7",
        "--pool.instances=['http://a:1', 'http://b:2']",
        "--model.path=3=x",
        "--run.dir=42",
    ]
    config = load_config(path, overrides)
    assert config.train.iterations == 7 and config.pool.instances == ("http://a:1", "http://b:2")
    assert (config.model.path, config.run.dir) == ("3=x", Path("42"))
    assert load_config(path, ["--train.iterations=7", "--train.iterations=8"]).train.iterations == 8


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--model.path.x=1", r"override --model\.path\.x: 'path' is a value, not a section"),
        ("--train.iteratoins=5", r"unknown key 'train\.iteratoins' \(value 5\): did you mean 'train\.iterations'\?"),
        ("--train.iterations=0", r"train\.iterations: .*greater than or equal to 1 \(got 0\)"),
        ("--train.iterations=many", r"train\.iterations: .*integer.* \(got 'many'\)"),
        ("--run.dir=/tmp/x\udcff", r"override '--run.dir=/tmp/x.udcff' is not UTF-8"),
        ("--train=3", r"train: .* \(got 3\)|valid dictionary"),
    ],
)
def test_an_override_that_cannot_be_is_named(tmp_path: Path, override: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_config(path, [override])
