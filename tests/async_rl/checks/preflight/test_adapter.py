"""Adapters that do not fit the model, or are not those that the config says, are refused before anything starts."""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.adapter import (
    PATTERNS,
    UNHELD,
    factor_shapes,
    require_adapters,
)
from async_rl.checks.preflight.model import ModelFiles
from async_rl.config.adapter_section import AdapterSection
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.protocol.adapter import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS
from tests.support.tiny_model import DEEPSEEKS_EXPERTS, LATENTS

SAVED: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
DEEPSEEK = {**CONFIGS["Qwen/Qwen3-8B"], "model_type": "deepseek_v3", **LATENTS, **DEEPSEEKS_EXPERTS}
del DEEPSEEK["head_dim"]
MODELS: dict[str, Any] = {**CONFIGS, "tiny DeepSeek-V3": DEEPSEEK}
GIVEN: dict[str, Any] = {"rank": 8, "alpha": 16}


def require(tmp_path: Path, model: str = "Qwen/Qwen3-8B", trainer: Any = None, **adapter: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    tree = {**minimal_tree(), "adapter": {**GIVEN, **adapter}, "trainer": trainer or {}}
    require_adapters(parse_config(tree, "here"), ModelFiles.find(str(tmp_path), is_whole=False))


def factors(**adapter: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape, of Qwen3-8B's."""
    return dict(
        factor_shapes(AdapterSection(**{**GIVEN, **adapter}), ModelShape.of_config(MODELS["Qwen/Qwen3-8B"], "here"))
    )


def saved(
    tmp_path: Path, factors: Mapping[str, Sequence[int]] | None = None, dtype: str = "F32", **changes: Any
) -> str:
    """A directory as peft writes it, whose weights are a hole in the file."""
    path = tmp_path / "adapters"
    path.mkdir()
    (path / CONFIG_FILE).write_text(json.dumps({**SAVED, **changes}))
    header, end = {}, 0
    for name, shape in (FACTORS if factors is None else factors).items():
        begin, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / WEIGHTS_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return str(path)


FACTORS = factors()
ONE = f"{PREFIX}model.layers.{{}}.self_attn.q_proj.lora_{{}}.weight"
WIDTHS = {"F32": 4, "BF16": 2, "I32": 4}


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
    ("critic", "words"),
    [
        ("tiny DeepSeek-V3", "has latent attention"),
        ("Qwen/Qwen3-30B-A3B", "are experts, which have no adapters"),
    ],
)
def test_a_critic_that_cannot_have_them_is_named(critic: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "critic"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[critic]))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-8B"]))
    tree = {**minimal_tree(), "adapter": GIVEN, "algorithm": {"name": "ppo", "options": {"critic_path": str(path)}}}
    with pytest.raises(ConfigError, match=rf"algorithm\.options\.critic_path '.*critic' {words}"):
        require_adapters(parse_config(tree, "here"), ModelFiles.find(str(tmp_path), is_whole=False))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "has peft_type = 'LOHA': only 'LORA' is held"),
        ({"r": 16}, r"has r = 16, but adapter\.rank is 8: set it to that"),
        ({"lora_alpha": 32}, r"has lora_alpha = 32, but adapter\.alpha is 16\.0: set it to that"),
        ({"target_modules": "^.*_proj$"}, r"has target_modules = '\^\.\*_proj\$': only a list"),
        *(({key: {"q_proj": 4}}, f"has {key} for 'q_proj': all layers need the same") for key in PATTERNS),
        ({"init_lora_weights": "pissa_niter_4"}, "has init_lora_weights = 'pissa_niter_4', which changes the base"),
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


def test_factors_in_bfloat16_are_read(tmp_path: Path) -> None:
    require(tmp_path, path=saved(tmp_path, dtype="BF16", init_lora_weights="gaussian"))


@pytest.mark.parametrize(
    ("factors", "dtype", "words"),
    [
        ({name: shape for name, shape in FACTORS.items() if ".35." not in name}, "F32", r"no '.*layers\.35\..*'"),
        ({**FACTORS, ONE.format(36, "A"): (8, 4096)}, "F32", r"'.*layers\.36\..*', which would be left out"),
        ({**FACTORS, ONE.format(0, "B").replace("weight", "bias"): (4096,)}, "F32", r"'.*bias', which would be left"),
        ({**FACTORS, "magnitude": (1,)}, "F32", "'magnitude', which would be left out"),
        (factors(rank=4), "F32", r"of shape \[4, 4096\] as F32, and .* adapter\.rank = 8 needs \[8, 4096\]"),
        ({**FACTORS, ONE.format(7, "B"): (2048, 8)}, "F32", r"'.*layers\.7\..*' of shape \[2048, 8\].*another model"),
        (FACTORS, "I32", "as I32, and .* as one of F64, F32, F16, BF16"),
    ],
)
def test_saved_factors_of_another_model_rank_or_form_are_named(
    factors: Mapping[str, tuple[int, ...]], dtype: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"\(adapter\.path\) has .*{words}"):
        require(tmp_path, path=saved(tmp_path, factors, dtype))


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    file = Path(path) / WEIGHTS_FILE
    for size in (file.stat().st_size - 1, 100, 0):
        with file.open("r+b") as opened:
            opened.truncate(size)
        with pytest.raises(ConfigError, match=rf"{WEIGHTS_FILE}' cannot be read as safetensors \({size} bytes\)"):
            require(tmp_path, path=path)


def test_a_run_that_goes_on_from_a_checkpoint_needs_no_adapters_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-8B"]))

    def look(*, resume: bool) -> None:
        tree = {**minimal_tree(), "adapter": {**GIVEN, "path": str(tmp_path / "gone")}}
        tree["run"] = {"dir": str(tmp_path / "run"), "resume": resume}
        require_adapters(parse_config(tree, "here"), ModelFiles.find(str(tmp_path), is_whole=False))

    for resume in (False, True):
        with pytest.raises(ConfigError, match=r"gone' \(adapter\.path\) has no adapter_config\.json"):
            look(resume=resume)
    (tmp_path / "run/checkpoints/iteration-000010").mkdir(parents=True)
    look(resume=True)
    with pytest.raises(ConfigError, match=r"\(adapter\.path\)"):
        look(resume=False)


def config(**adapter: Any) -> Config:
    return parse_config({**minimal_tree(), "adapter": adapter}, "here")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"alpha": 8}, r"adapter\.alpha.*adapter\.rank"),
        ({"rank": 0}, r"adapter\.rank"),
        ({"rank": 8, "alpha": 1e300}, r"adapter\.alpha"),
        ({"rank": 8, "targets": []}, r"adapter\.targets"),
        ({"rank": 8, "targets": ["lm_head"]}, r"adapter\.targets"),
        ({"rank": 8, "targets": ["all-linear", "q_proj"]}, "leave one of them out"),
        ({"rank": 8, "dropout": 0.1}, r"adapter\.dropout"),
    ],
)
def test_settings_that_have_no_meaning_are_named(adapter: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**adapter)
