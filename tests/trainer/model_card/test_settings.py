"""The settings that a model card shows: valid TOML, without secrets and folders."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from trainer.model_card.card import settings_toml, shown


def config(**sections: Any) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": "runs/x"},
        "model": {"path": "m"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4},
        "reward": {"name": "math"},
        "train": {"iterations": 2},
    }
    return parse_config({name: tree.get(name, {}) | sections.get(name, {}) for name in {**tree, **sections}}, "test")


def test_they_are_toml_of_what_differs_from_the_defaults_and_decides_what_was_trained() -> None:
    text = settings_toml(
        config(
            pool={"instances": ["http://10.0.0.7:8000"]},
            cluster={"env": {"WANDB_KEY": "x"}},
            prompts={"columns": {"answer": "a.b", "x y": "c"}},
            optimizer={"learning_rate": 3e-6},
        )
    )
    assert tomllib.loads(text) == {
        "run": {"seed": 0},
        "model": {"path": "m"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 4, "columns": {"answer": "a.b", "x y": "c"}},
        "reward": {"name": "math"},
        "optimizer": {"learning_rate": 3e-6},
        "train": {"iterations": 2},
    }


# No text of a config has a zero character.
TEXT = st.characters(codec="utf-8", exclude_characters="\0")


@given(st.text(TEXT), st.text(TEXT, min_size=1))
def test_any_text_is_valid_toml(text: str, name: str) -> None:
    made = config(prompts={"system_prompt": text, "columns": {name: "c"}})
    if name != "temperature":
        assert tomllib.loads(settings_toml(made))["prompts"]["columns"].keys() == {name}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("command:agent --api-key abc123 --steps 4", "command:agent --api-key *** --steps 4"),
        ("command:env OPENAI_API_KEY=abc agent", "command:env OPENAI_API_KEY=*** agent"),
        ("command:agent --token=abc", "command:agent --token=***"),
        ("http://user:pass@host:8000/v1", "http://***@host:8000/v1"),
        ("http://host:8000/v1/score", "http://host:8000/v1/score"),
        ("https://host/score?key=abc#x", "https://host/score?***"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("hf_abcdefghijklmnop and sk-proj-abcdefghijkl", "*** and ***"),
        ("/home/someone/data/rows.jsonl", ".../rows.jsonl"),
        ("~/data/rows.jsonl", ".../rows.jsonl"),
        ("python:/home/someone/reward.py:exact", "python:.../reward.py:exact"),
        ("python:reward.py:exact", "python:reward.py:exact"),
        ("data/rows.jsonl", "data/rows.jsonl"),
        ("hf:openai/gsm8k:main:train", "hf:openai/gsm8k:main:train"),
        (
            {"my_api_key": "abc", "Password": "x", "stop_token_ids": [7], "size": 3},
            {"my_api_key": "***", "Password": "***", "stop_token_ids": [7], "size": 3},
        ),
        (["/a/b", {"token": "t"}], [".../b", {"token": "***"}]),
    ],
    ids=str,
)
def test_secrets_and_folders_are_masked(value: Any, expected: Any) -> None:
    assert shown(value, "name") == expected


def test_prose_keeps_its_slashes() -> None:
    text = "Answer with /think/ off, and count every token."
    assert shown(text, "system_prompt") == text
