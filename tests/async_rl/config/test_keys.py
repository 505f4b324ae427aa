"""The keys of a config as its models say them: for every key of the real one, and for what is mistyped."""

import json
import tomllib
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from async_rl.config.keys import Key, explain_unknown, find_key, keys_of, nearest, read_value, set_dotted
from async_rl.config.sections import Config

KEYS = keys_of(Config)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_every_key_has_a_meaning_and_its_default_is_a_value_that_it_takes(key: Key) -> None:
    assert key.name == f"{key.section}.{key.name.partition('.')[2]}" and key.description and key.takes
    assert find_key(Config, key.name) is key
    if key.default is None:
        return
    default = read_value(key.default) if key.default == "inf" else json.loads(key.default)
    tree: dict[str, Any] = {}
    set_dotted(tree, key.name, default)
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        told = [item["loc"] for item in error.errors() if item["type"] != "missing"]
        assert tuple(key.name.split(".")) not in told, "the default itself is refused"


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_with_one_letter_wrong_is_found_again(key: Key) -> None:
    rng = Random(key.name)
    name = key.name.partition(".")[2]
    place = rng.randrange(len(name))
    for wrong in (name[:place] + name[place + 1 :], name[:place] + "x" + name[place:]):
        if len(name) < 5 or f"{key.section}.{wrong}" in KEYS or any(each.endswith(f".{wrong}") for each in KEYS):
            continue
        said = explain_unknown(Config, (key.section, wrong))
        assert "did you mean" in said and f"[{key.section}] has " in said
        near = said.partition("did you mean '")[2].partition("'")[0]
        assert near == key.name or (near in KEYS and near.startswith(f"{key.section}.")), (wrong, near)


def test_a_key_of_another_section_is_named_with_that_section() -> None:
    assert "did you mean 'optimizer.learning_rate'?" in explain_unknown(Config, ("train", "learning_rate"))
    assert "did you mean 'optimizer.learning_rate'?" in explain_unknown(Config, ("learning_rate",))
    said = explain_unknown(Config, ("qqqqqqqq",))
    assert said.startswith("correct its spelling or remove it; the sections are ") and "train" in said
    said = explain_unknown(Config, ("evaluation", "sets", 0, "nmae"))
    assert said.startswith("did you mean 'name'? each of evaluation.sets has name, ")
    said = explain_unknown(Config, ("rollout", "options", "max_trns"))
    assert said.startswith("did you mean 'max_turns'? rollout.options has max_turns, ")


def test_keys_below_a_users_table_are_its_own_and_others_are_unknown() -> None:
    key = find_key(Config, "prompts.task_options.min_word_len")
    assert key is not None and (key.section, key.is_text) == ("prompts", False) and key.read("3") == 3
    for name in (
        "rollout.options.nothing",
        "prompts",
        "prompts.nothing",
        "prompts.source.below",
        "nothing.task_options.x",
        "",
        ".",
        "a.b.c.d",
    ):
        assert find_key(Config, name) is None


VALUES = [
    ("3", 3),
    ("-1.5e3", -1500.0),
    ("true", True),
    ("True", "True"),
    ("null", None),
    ('"3"', "3"),
    ("[1, 2]", [1, 2]),
    ('{"a": 1}', {"a": 1}),
    ("{a = 1}", {"a": 1}),
    ("", ""),
    ("a b", "a b"),
    ("1\nother = 2", "1\nother = 2"),
    ("1 # not a comment of ours", 1),
    ("http://a:1", "http://a:1"),
    ("[" * 100_000, "[" * 100_000),
    ("2026-01-01", tomllib.loads("v = 2026-01-01")["v"]),
]


@pytest.mark.parametrize(("text", "value"), VALUES, ids=range(len(VALUES)))
def test_a_word_is_read_as_toml_then_as_json_then_as_it_is(text: str, value: Any) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize("text", ["3", "true", "[1]", "null", ""])
def test_a_key_that_takes_text_takes_every_word_as_it_is(text: str) -> None:
    key = find_key(Config, "run.dir")
    assert key is not None and key.is_text and key.read(text) == text


def test_setting_a_key_makes_the_tables_on_its_way_and_goes_through_no_value() -> None:
    tree: dict[str, Any] = {"a": {"b": 1}}
    set_dotted(tree, "a.c.d", 2)
    set_dotted(tree, "e", 3)
    set_dotted(tree, "a.c.d", 4)
    assert tree == {"a": {"b": 1, "c": {"d": 4}}, "e": 3}
    with pytest.raises(ValueError, match="'b' is a value, not a section"):
        set_dotted(tree, "a.b.c", 2)
    assert tree["a"]["b"] == 1


def test_nothing_is_near_to_what_is_like_nothing() -> None:
    assert nearest("zzz", ["train", "run"]) is None and nearest("trian", ["train", "run"]) == "train"
