"""Each key of each family's config class, flipped: the model is that of transformers, or the config is refused by name.

A key that changes nothing in transformers changes nothing here either: the weights are the same, and so is the model.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from async_rl.checks.preflight.model import ModelFiles, require_supported
from async_rl.errors import ConfigError
from async_rl.method.types import Group
from async_rl.shared.model_families import BIAS_KEYS, TABLE
from async_rl.shared.model_limits import FAMILIES
from tests.support.tiny_model import FAMILIES as CLASSES
from tests.support.tiny_model import MODEL_SIZE, make_tiny_model
from trainer.forward_backward import make_passes
from trainer.parallel import Parallel

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SLOW = {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 32}
"""With so small a base each of its parameters changes frequencies of few dimensions."""
DEFAULT = {"rope_type": "default", "rope_theta": 77.0}

OTHERS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", "relu", "swish"),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 77.0},
        {**LLAMA3, **LLAMA3_CONSTANTS},
        {**LLAMA3, **LLAMA3_CONSTANTS, "low_freq_factor": 2.0, "original_max_position_embeddings": 16},
        YARN,
        {**YARN, "attention_factor": 0.7, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
        {**YARN, "mscale": 1.5, "mscale_all_dim": 0.8},
        SLOW,
        {**SLOW, "truncate": False},
        {"full_attention": SLOW, "sliding_attention": DEFAULT},
        {"full_attention": {**SLOW, "truncate": False}, "sliding_attention": DEFAULT},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 55.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}},
        {"full_attention": None, "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "layer_types": (
        ["full_attention", "sliding_attention"],
        ["sliding_attention"] * 2,
        ["full_attention"] * 2,
        ["full_attention", "linear_attention"],
        ["linear_attention"] * 2,
    ),
    "original_max_position_embeddings": (128, None),
    "sliding_window": (1, 3, None),
    "use_sliding_window": (True,),
    "mlp_only_layers": ([1],),
    "no_rope_layers": ([0, 1], [0, 0]),
    "num_key_value_heads": (4, 1),
    "n_group": (1, 2, 8),
    "topk_group": (1, 4, 5),
    "first_k_dense_replace": (0, 2),
    "partial_rotary_factor": (1.0,),
    "q_lora_rank": (None, 20),
    "num_experts_per_tok": (1, 3),
    "dtype": ("float32", "bfloat16"),
    "architectures": (["Other"],),
    "problem_type": ("regression",),
}
"""Values to try where the kind of a value does not tell any."""

WITH = {
    "use_sliding_window": {"sliding_window": 4, "max_window_layers": 1},
    "layer_types": {"sliding_window": 4, "use_sliding_window": True},
}
"""What a key needs to have an effect."""

REFUSED_BY_FILES = {"num_hidden_layers", "hidden_size", "vocab_size"}
"""Sizes that only the files refuse; with others there is another model to compare."""

NO_MODEL = {"model_type", "transformers_version", "_name_or_path", "id2label", "label2id", "return_dict"}
"""Names of the file and of other classes, and the form of what is returned: none says anything about the model."""


def others_of(key: str, value: Any) -> tuple[Any, ...]:
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value * 2, value + 1) if value else (1,)
    if isinstance(value, float):
        return (value * 3 + 0.1,)
    return (7,) if value is None else ()


def flips() -> Iterator[Any]:
    """Left to the night are those that a family before it has, too, and all but the first value of a number; first are
    the families with keys of their own."""
    met: set[str] = set()
    for family in ("qwen3_moe", "qwen2", *(family for family in FAMILIES if family not in ("qwen3_moe", "qwen2"))):
        for key, value in (tiny_config(family) | {"original_max_position_embeddings": None}).items():
            for i, other in enumerate(() if key in NO_MODEL else others_of(key, value)):
                flip = f"{key}-{other}"
                marks = [pytest.mark.nightly] if flip in met or (i and key not in OTHERS) else []
                yield pytest.param(family, key, other, id=f"{family}-{flip}", marks=marks)
                met.add(flip)


@cache
def tiny_config(family: str) -> dict[str, Any]:
    config_class, own = CLASSES[family]
    return config_class(**{**own, **MODEL_SIZE, "tie_word_embeddings": False}).to_dict()


@cache
def base(family: str, root: Path) -> tuple[Path, torch.Tensor]:
    """A model of the family, and its logits."""
    path = make_tiny_model(root / family, family)
    return path, logits_of(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 33)[None]).logits[0]


def model_of(path: Path) -> PreTrainedModel | None:
    """That of transformers: with the weights of the directory, or random ones if they are of other sizes.

    None if the config is none of any model.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        torch.manual_seed(0)
        fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = load_file(path / "model.safetensors")
        shapes = {name: parameter.shape for name, parameter in fresh.named_parameters()}
        logits_of(fresh)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, StrictDataclassError):
        return None
    if {name: tensor.shape for name, tensor in weights.items()} == shapes or "experts" in str(shapes):
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except RuntimeError:
            pass
    return fresh


@pytest.mark.parametrize(("family", "key", "other"), list(flips()))
def test_a_flipped_key_is_held_or_refused_by_name(
    family: str,
    key: str,
    other: Any,
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    make_trainer: Callable[..., Any],
    grpo_in_transformers: Callable[..., Any],
    ragged_groups: list[Group],
    parallel: Parallel,
) -> None:
    start, logits = base(family, tmp_path_factory.getbasetemp() / "features")
    path = Path(shutil.copytree(start, tmp_path / "model"))
    # A family without windows refuses what switches them on.
    needed = WITH.get(key, {}) if TABLE[family].windows is not None or key != "layer_types" else {}
    if key == "original_max_position_embeddings":
        rope = {**SLOW, **({"llama_4_scaling_beta": 0.1} if TABLE[family].scales_queries else {})}
        by_kind = {"full_attention": rope, "sliding_attention": DEFAULT}
        needed = {"rope_parameters": rope if TABLE[family].local_theta is None else by_kind}
    config = json.loads((path / "config.json").read_text()) | needed | {key: other}
    if key == "num_hidden_layers":
        for by_layer in ("layer_types", "no_rope_layers"):
            config.pop(by_layer, None)
    (path / "config.json").write_text(json.dumps(config))
    try:
        # The files have the layers, and sizes, of before.
        is_of_files = key in ("layer_types", "q_lora_rank", *BIAS_KEYS) or (
            type(other) is int and key not in REFUSED_BY_FILES
        )
        require_supported(ModelFiles.find(str(path)), is_whole=not is_of_files)
    except ConfigError as error:
        of_rope = key in ("rope_parameters", "max_position_embeddings")
        assert key in str(error) or (of_rope and ("rope" in str(error) or "rotary" in str(error)))
        return
    model = model_of(path)
    if model is None or torch.equal(logits_of(model), logits):
        return
    # It is another model, of other sizes perhaps.
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {key: other}))
    groups = ragged_groups[:1]
    expected = grpo_in_transformers(path, path, groups)
    trainer = make_trainer(path)
    (ours_N,) = make_passes([groups], parallel, 1.0, 8192)[0].logprobs(trainer.models.policy_model)
    theirs = [value for row in expected.logprobs[0] for value in row]
    assert ours_N.tolist() == pytest.approx(theirs, abs=2e-5)


def test_a_head_that_would_be_left_out_or_is_missing_is_refused(tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", "qwen3", tied=True)
    own = make_tiny_model(tmp_path / "own", "qwen3")
    for path in (tied, own):
        require_supported(ModelFiles.find(str(path)))
    weights = load_file(tied / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, tied / "model.safetensors")
    require_supported(ModelFiles.find(str(tied)))
    save_file({**weights, "lm_head.weight": embedding + 1e-3}, tied / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"a lm_head\.weight that is not its model\.embed_tokens\.weight and would be"
    ):
        require_supported(ModelFiles.find(str(tied)))
    weights = load_file(own / "model.safetensors")
    biased = {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(biased, own / "model.safetensors")
    with pytest.raises(
        ConfigError,
        match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which models of its .* attention_bias true only",
    ):
        require_supported(ModelFiles.find(str(own)))
    del weights["lm_head.weight"]
    save_file(weights, own / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no lm_head\.weight, though its config\.json has tie_word_embeddings ="):
        require_supported(ModelFiles.find(str(own)))


def test_a_text_model_under_the_names_of_one_with_images_is_refused_with_the_way_to_save_it(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "qwen3_5_text")
    weights = load_file(path / "model.safetensors")
    beside_images = {name.replace("model.", "model.language_model."): tensor for name, tensor in weights.items()}
    save_file(beside_images, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"under 'model\.language_model\.', .* save_original_format=False"):
        require_supported(ModelFiles.find(str(path)))


@pytest.mark.parametrize(
    ("key", "value", "stored"), [("num_hidden_layers", -1, "layers"), ("vocab_size", 1, "an embedding of")]
)
def test_files_of_other_sizes_than_the_config_says_are_refused(
    tmp_path: Path, key: str, value: int, stored: str
) -> None:
    """Layers beyond the last one would be left out."""
    path = make_tiny_model(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: config[key] + value}))
    with pytest.raises(ConfigError, match=f"{key} = {config[key] + value}.* in its config.json and .*{stored}"):
        require_supported(ModelFiles.find(str(path)))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_layers_of_another_kind_than_the_config_says_are_refused(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, num_hidden_layers=4)
    require_supported(ModelFiles.find(str(path)))
    config = json.loads((path / "config.json").read_text())
    for kinds, layer, said, stored in (
        (["linear_attention"] * 3 + ["full_attention"], 1, "linear attention", "attention"),
        (["full_attention"] * 4, 0, "attention", "linear attention"),
        (None, 1, "linear attention", "attention"),
    ):
        changed = {key: value for key, value in config.items() if key != "layer_types"}
        (path / "config.json").write_text(json.dumps(changed | ({"layer_types": kinds} if kinds else {})))
        files = ModelFiles.find(str(path))
        require_supported(files, is_whole=False)
        with pytest.raises(ConfigError, match=f" has {said} in layer {layer}, .* and {stored} there in its"):
            require_supported(files)


SIZES = {
    "qwen3": ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    "qwen3_moe": ("num_local_experts", "moe_intermediate_size"),
    "deepseek_v3": ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "n_routed_experts"),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text"),
        (
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ),
    ),
}


@pytest.mark.parametrize("family", SIZES)
def test_layers_of_other_sizes_than_the_config_says_are_refused_by_the_headers(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    require_supported(ModelFiles.find(str(path)))
    config = json.loads((path / "config.json").read_text())
    for key in SIZES[family]:
        named = {
            "num_local_experts": "8 experts",
            "n_routed_experts": "16 experts",
            "moe_intermediate_size": "experts of 48",
        }
        (path / "config.json").write_text(json.dumps(config | {key: 2 * config[key]}))
        with pytest.raises(ConfigError, match=rf"has .*{named.get(key, f'{key} = ')}.*so that .* in its safetensors"):
            require_supported(ModelFiles.find(str(path)))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 96, "content": "<more>"})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match="has a tokenizer with tokens up to 96, but the model's vocabulary ends at 95"
    ):
        require_supported(ModelFiles.find(str(path)))


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rope_by_layer_type_is_refused_by_name(name: str) -> None:
    config = {"model_type": "llama", name: {"full_attention": {"rope_type": "default"}}}
    with pytest.raises(ConfigError, match=f"has {name} by layer type in its config.json"):
        require_supported(ModelFiles("m", None, config, {}), is_whole=False)
