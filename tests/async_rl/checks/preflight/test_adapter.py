"""Adapters that do not fit the model, or are not those that the config says, are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.adapter import CONFIG_FILE, PATTERNS, UNHELD, WEIGHTS_FILE, require_adapters
from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS
from tests.support.tiny_model import DEEPSEEKS_EXPERTS, LATENTS

SAVED = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
DEEPSEEK = {**CONFIGS["Qwen/Qwen3-8B"], "model_type": "deepseek_v3", **LATENTS, **DEEPSEEKS_EXPERTS}
del DEEPSEEK["head_dim"]
MODELS: dict[str, Any] = {**CONFIGS, "tiny DeepSeek-V3": DEEPSEEK}
GIVEN: dict[str, Any] = {"rank": 8, "alpha": 16}


def require(tmp_path: Path, model: str = "Qwen/Qwen3-8B", trainer: Any = None, **adapter: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    tree = {**minimal_tree(), "adapter": {**GIVEN, **adapter}, "trainer": trainer or {}}
    require_adapters(parse_config(tree, "here"), ModelFiles.find(str(tmp_path), is_whole=False))


def saved(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "adapters"
    path.mkdir()
    (path / CONFIG_FILE).write_text(json.dumps({**SAVED, **changes}))
    (path / WEIGHTS_FILE).touch()
    return str(path)


def test_what_fits_passes(tmp_path: Path) -> None:
    require(tmp_path)
    require(tmp_path, trainer={"tensor_parallel": 8}, targets=["q_proj", "down_proj"], rank=512)
    require(tmp_path, path=saved(tmp_path, **UNHELD, rank_pattern={r".*\.gate_up_proj": 16}))


@pytest.mark.parametrize(
    ("model", "trainer", "adapter", "words"),
    [
        ("tiny DeepSeek-V3", {}, {}, r"adapter\.rank is 8, but model.path .* has latent attention.*leave"),
        ("Qwen/Qwen3-30B-A3B", {}, {}, r"adapter\.targets has 'all-linear', but .* are experts.*name some of q_proj"),
        ("Qwen/Qwen3-30B-A3B", {}, {"targets": ["q_proj", "up_proj"]}, r"adapter\.targets has 'up_proj', but"),
        (
            "Qwen/Qwen3-8B",
            {"tensor_parallel": 16},
            {},
            r"ranks that share one of the model's 8 key / value heads.*lower",
        ),
        ("Qwen/Qwen3-8B", {}, {"rank": 1025}, r"adapter\.rank is 1025, more than self_attn\.k_proj.*\(1024 x 4096\)"),
    ],
)
def test_what_the_model_cannot_have_is_named(
    model: str, trainer: dict[str, Any], adapter: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        require(tmp_path, model, trainer, **adapter)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "has peft_type = 'LOHA': only 'LORA' is held"),
        ({"r": 16}, r"has r = 16, but adapter\.rank is 8: set it to that"),
        ({"lora_alpha": 32}, r"has lora_alpha = 32, but adapter\.alpha is 16\.0: set it to that"),
        ({"target_modules": "^.*_proj$"}, r"has target_modules = '\^\.\*_proj\$': only a list"),
        *(({key: {"q_proj": 4}}, f"has {key} for 'q_proj': all layers need the same") for key in PATTERNS),
        *(({key: "all" if held == "none" else [1]}, f"has {key} = .* is held") for key, held in UNHELD.items()),
    ],
)
def test_saved_adapters_of_another_form_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"\(adapter\.path\) {words}"):
        require(tmp_path, path=saved(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "[" * 10**5])
def test_a_damaged_directory_is_named(text: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (Path(path) / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"\(adapter\.path\) has (no adapter_config\.json|peft_type)"):
        require(tmp_path, path=path)
    (Path(path) / CONFIG_FILE).write_text(json.dumps(SAVED))
    (Path(path) / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        require(tmp_path, path=path)


def config(**adapter: Any) -> Config:
    return parse_config({**minimal_tree(), "adapter": adapter}, "here")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"alpha": 8}, r"adapter\.alpha.*adapter\.rank"),
        ({"rank": 0}, r"adapter\.rank"),
        ({"rank": 8, "targets": []}, r"adapter\.targets"),
        ({"rank": 8, "targets": ["lm_head"]}, r"adapter\.targets"),
        ({"rank": 8, "targets": ["all-linear", "q_proj"]}, "leave one of them out"),
        ({"rank": 8, "dropout": 0.1}, r"adapter\.dropout"),
    ],
)
def test_settings_that_have_no_meaning_are_named(adapter: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**adapter)
