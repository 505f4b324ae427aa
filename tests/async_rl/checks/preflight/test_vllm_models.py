"""What of a config.json vLLM computes otherwise than trainer and embedded engine: refused by name where vLLM serves."""

from pathlib import Path
from typing import Any

import pytest

from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.vllm_models import MISSING, VLLM, require_vllm
from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.model_limits import FAMILIES
from tests.support.minimal_config import minimal_tree
from tests.support.published_models import CONFIGS
from tests.support.tiny_model import FAMILIES as TINY
from tests.support.tiny_model import MODEL_SIZE

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 8},
    "gpt_oss": {"swiglu_limit": 7.0},
}
"""What published checkpoints have, and transformers does not read; or what tiny models have otherwise."""

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}

UNLIKE: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"head_dim": 16}, r"has head_dim = 16 .*expected its hidden_size divided by its 4 heads"),
    ("qwen2", {**WINDOWS, "max_window_layers": 1}, r"has windows in 1 of its layers .*expected windows in all, or"),
    ("qwen3", {**WINDOWS, "layer_types": [SLIDING, FULL]}, "has windows in 1 of its layers"),
    ("qwen3", {"architectures": 7}, r"has architectures = 7.*expected a list"),
    ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, r"has architectures = .*its model_type 'qwen3'"),
    ("qwen3_moe", {**WINDOWS, "layer_types": [FULL, FULL]}, "has layer_types .*expected none, beside a sliding_window"),
    ("mistral", {"sliding_window": 4, "layer_types": [FULL, FULL]}, "has layer_types"),
    ("llama", {"sliding_window": 4}, "has sliding_window = 4 .*expected none"),
    ("ministral3", {}, r"has llama_4_scaling_beta, .*expected no more than 8 tokens a sequence"),
    ("minimax_m2", {"rotary_dim": None}, "has no rotary_dim"),
    ("gpt_oss", {"layer_types": [FULL, SLIDING]}, r"has layer_types = .*a window in every other layer, from the first"),
    ("gpt_oss", {"layer_types": [FULL, FULL]}, "has layer_types"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"has rope_type 'default' .*'yarn'"),
    ("gpt_oss", {"rope_parameters": YARN}, r"has no beta_fast in rope_parameters .*\n.*has no beta_slow"),
    ("gpt_oss", {"rope_parameters": {**YARN, **BETAS, "attention_factor": 0.7}}, "has attention_factor = 0.7 in rope"),
    ("deepseek_v3", {"rope_parameters": LINEAR}, "has rope_type 'linear' .*'yarn' or 'default'"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.5}}, "has no mscale_all_dim in rope_parameters"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "truncate": False}}, "has truncate False in rope_parameters"),
    ("deepseek_v3", {"rope_parameters": {**YARN, "attention_factor": 1.0}}, "has attention_factor = 1.0 in rope"),
]
"""(family, keys of its config.json, None for one that is left out, and what is said)."""

ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {**WINDOWS, "max_window_layers": 0}),
    ("qwen2", {**WINDOWS, "max_window_layers": 2}),
    ("qwen2", {"sliding_window": 4}),
    ("qwen3", {"architectures": ["Qwen3ForCausalLM"]}),
    ("qwen3_moe", WINDOWS),
    ("mistral", {"sliding_window": 4, "architectures": ["MistralForCausalLM"]}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}, "attention_bias": True, "mlp_bias": True}),
    ("qwen3_5_moe_text", {"architectures": ["Qwen3_5MoeForCausalLM"], "norm_topk_prob": True}),
    ("gpt_oss", {"layer_types": None}),
    ("gpt_oss", {"layer_types": [SLIDING, SLIDING]}),
    ("deepseek_v3", {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}),
    ("deepseek_v3", {"rope_parameters": YARN}),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
]


def config_of(**sections: Any) -> Config:
    tree = minimal_tree()
    tree |= {"inference": {"engine": "vllm"}, **sections}
    return parse_config(tree, "here")


def files_of(family: str, changed: dict[str, Any]) -> ModelFiles:
    """A tiny model of the family; None leaves a key out."""
    config_class, own = TINY[family]
    size = {**own, **MODEL_SIZE, "tie_word_embeddings": False}
    if "layer_types" in own:
        size["layer_types"] = [SLIDING, FULL]
    if "kv_lora_rank" in own:
        size["num_key_value_heads"] = 4
    # These follow from others, if they are not given.
    whole = {key: value for key, value in config_class(**size).to_dict().items() if key not in ("layer_types", "dtype")}
    whole |= {key: own[key] for key in ("layer_types",) if key in own} | PUBLISHED.get(family, {}) | changed
    return ModelFiles("some/model", None, {key: value for key, value in whole.items() if value is not None}, {})


def short() -> Config:
    """A run whose sequences have 8 tokens at most."""
    return config_of(prompts={**minimal_tree()["prompts"], "max_prompt_tokens": 4}, rollout={"max_response_tokens": 4})


@pytest.mark.parametrize("family", FAMILIES)
def test_models_as_they_are_published_are_held(family: str) -> None:
    require_vllm(short(), files_of(family, {}))
    assert family in VLLM


@pytest.mark.parametrize("name", CONFIGS)
def test_published_sizes_are_held(name: str) -> None:
    require_vllm(config_of(), ModelFiles(name, None, CONFIGS[name], {}))


@pytest.mark.parametrize(("family", "changed"), ALIKE)
def test_what_vllm_computes_as_the_trainer_is_held(family: str, changed: dict[str, Any]) -> None:
    require_vllm(config_of(), files_of(family, changed))


@pytest.mark.parametrize(("family", "changed", "words"), UNLIKE)
def test_what_vllm_computes_otherwise_is_refused_by_name(family: str, changed: dict[str, Any], words: str) -> None:
    files = files_of(family, changed)
    with pytest.raises(ConfigError, match=f"(?s)some/model' {words}"):
        require_vllm(config_of(), files)
    require_vllm(config_of(inference={"engine": "transformers"}), files)
    # Instances that run elsewhere may have another engine.
    require_vllm(config_of(pool={"instances": ["http://a:1"]}), files)


def other_than(value: object) -> Any:
    """Another value of the kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return "other"


@pytest.mark.parametrize(("family", "key"), [(family, key) for family, held in VLLM.items() for key in held])
def test_each_key_that_vllm_computes_otherwise_is_refused_by_name(family: str, key: str) -> None:
    left_out, *others = VLLM[family][key]
    changed = other_than(others[0] if others else left_out)
    if key == "layer_types":
        changed = [FULL, FULL]
    files = files_of(family, {key: changed})
    try:
        _ = files.shape
    except ConfigError as error:
        # The trainer does not hold it either.
        assert key in str(error)
    else:
        with pytest.raises(ConfigError, match=rf"has {key} = .*, which inference\.engine = 'vllm' does not compute"):
            require_vllm(short(), files)
    if left_out is MISSING:
        with pytest.raises(ConfigError, match=rf"has no {key} in its config\.json, .*: expected '?{others[0]}"):
            require_vllm(short(), files_of(family, {key: None}))


def test_each_key_is_in_the_page_of_models() -> None:
    page = Path("docs/models.md").read_text()
    assert [key for held in VLLM.values() for key in held if f"`{key}`" not in page] == []


def test_mxfp4_is_refused_where_vllm_would_serve_it() -> None:
    files = files_of("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}})
    require_vllm(config_of(inference={"engine": "transformers"}), files)
    require_vllm(config_of(pool={"instances": ["http://a:1"]}), files)
    with pytest.raises(ConfigError, match=r"is in mxfp4 .*'vllm' does not serve .*Mxfp4Config\(dequantize=True\)"):
        require_vllm(config_of(), files)
