"""A config.json is read as transformers reads it, and what cannot be trained is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from async_rl.errors import ConfigError
from async_rl.shared.layer_windows import FULL, SLIDING
from async_rl.shared.model_families import BESIDE_IMAGES, ORIGINAL, QKV_BIAS, QUERY_BETA, TABLE
from async_rl.shared.model_limits import FAMILIES
from async_rl.shared.model_parts import Experts, Multipliers, Rope
from async_rl.shared.model_shape import ModelShape, stage_layers
from tests.support.tiny_model import CLAMPED_EXPERTS, DEEPSEEKS_EXPERTS, LATENTS, MODEL_SIZE, UNGROUPED_EXPERTS
from tests.support.tiny_model import FAMILIES as TINY

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "mistral": MistralConfig,
    "smollm3": SmolLM3Config,
    "seed_oss": SeedOssConfig,
    "ministral": MinistralConfig,
    "ministral3": Ministral3Config,
    "granite": GraniteConfig,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe": Glm4MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "gemma3_text": Gemma3TextConfig,
    "gpt_oss": GptOssConfig,
    "minimax_m2": MiniMaxM2Config,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

UNREAD = {
    *("model_type", "transformers_version", "use_sliding_window", "max_window_layers", "no_rope_layer_interval"),
    *("attention_dropout", "residual_dropout", "initializer_range", "use_cache", "router_aux_loss_coef"),
    "router_jitter_noise",
    *("pretraining_tp", "output_router_logits", "output_hidden_states", "is_encoder_decoder", "architectures"),
    *("max_position_embeddings", "return_dict", "chunk_size_feed_forward", "output_attentions", "id2label", "label2id"),
}
"""Keys that say nothing about the model where they are null; `async-rl check` passes transformers' refusal on."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
OF_MORE_PARTS = {
    *("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo3", "gemma3_text"),
    *("gpt_oss", "minimax_m2"),
}
SCALED = {"ministral3": {QUERY_BETA: 0.5, ORIGINAL: 8}}
DELTA_HEADS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
NO_WINDOW = {"sliding_window": None}
GPT_OSS = {"model_type": "gpt_oss", **CLAMPED_EXPERTS}
MINIMAX = {"model_type": "minimax_m2", **UNGROUPED_EXPERTS}
SCALED_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **SCALED["ministral3"]}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    own = {
        "qwen3_moe": EXPERTS,
        "mistral": NO_WINDOW,
        "ministral": {**NO_WINDOW, "head_dim": 8},
        "smollm3": {"pad_token_id": None},
        "deepseek_v3": {**DEEPSEEKS_EXPERTS, **LATENTS, "num_key_value_heads": 4},
        "glm4_moe": {**DEEPSEEKS_EXPERTS, "n_group": 2},
        "qwen3_next": {**EXPERTS, **DELTA_HEADS, "shared_expert_intermediate_size": 20},
        "qwen3_5_text": DELTA_HEADS,
        "qwen3_5_moe_text": {**EXPERTS, **DELTA_HEADS, "shared_expert_intermediate_size": 20},
        "gpt_oss": CLAMPED_EXPERTS,
        "minimax_m2": UNGROUPED_EXPERTS,
    }.get(family, {})
    return {**SIZES, **own, "model_type": family, **changes}


def read(family: str, **config: Any) -> ModelShape:
    """As transformers writes it."""
    return ModelShape.of_config(json.loads(CONFIGS[family](**config).to_json_string()), "here")


def num_parameters(config: dict[str, Any]) -> int:
    """Of transformers' model, without memory for it."""
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_model(family: str, tied: bool) -> None:
    config = config_of(family, tie_word_embeddings=tied)
    assert ModelShape.of_config(config, "here").num_parameters == num_parameters(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(family: str) -> None:
    config = config_of(family)
    config.pop("head_dim", None)
    saved = AutoConfig.for_model(**config).to_dict()
    assert saved.keys() > {"rms_norm_eps", "rope_parameters", "tie_word_embeddings"} and "rms_norm_eps" not in config
    assert ModelShape.of_config(config, "here") == ModelShape.of_config(saved, "here")


def test_a_model_with_experts_in_every_layer_needs_no_size_of_dense_ones() -> None:
    """As Qwen3.5's have none; and weights of experts that transformers always makes sum to 1 have no key."""
    config = config_of("qwen3_5_moe_text", norm_topk_prob=False)
    del config["intermediate_size"]
    shape = ModelShape.of_config(config, "here")
    assert shape.num_parameters == num_parameters(config)
    assert shape.experts is not None and shape.experts.renormalized
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 1 in its .*: expected a number from 2"):
        ModelShape.of_config({**config, "num_experts_per_tok": 1}, "here")


def test_rope_is_read_under_the_names_of_older_releases() -> None:
    new = config_of("llama", rope_parameters=LLAMA3)
    old = config_of("llama", rope_theta=5e5, rope_scaling={**LLAMA3, "type": LLAMA3["rope_type"]})
    del old["rope_scaling"]["rope_type"], old["rope_scaling"]["rope_theta"]
    shape = ModelShape.of_config(new, "here")
    kept = {name: value for name, value in LLAMA3.items() if not name.startswith("rope")}
    assert (shape.rope, shape.rope_theta) == (Rope("llama3", tuple(sorted(kept.items()))), 5e5)
    assert shape == ModelShape.of_config(old, "here")
    assert shape == ModelShape.of_config(AutoConfig.for_model(**old).to_dict(), "here")


@pytest.mark.parametrize("more", [{}, {"partial_rotary_factor": 0.25}, {"rope_parameters": {"rope_type": "default"}}])
def test_rotated_dimensions_of_released_minimax_checkpoints_are_those_of_transformers(more: dict[str, Any]) -> None:
    config = config_of("minimax_m2", head_dim=16, rotary_dim=8) | {"rope_parameters": None} | more
    shape = ModelShape.of_config(config, "here")
    assert shape == ModelShape.of_config(AutoConfig.for_model(**config).to_dict(), "here")
    assert shape.rotary_dim == (4 if "partial_rotary_factor" in more else 8)


def test_a_published_size_needs_nothing_but_its_config() -> None:
    # Qwen3-8B's config.json, and the number of parameters that its weights' index gives.
    config = {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }
    assert ModelShape.of_config(config, "here").num_parameters == 8_190_735_360


def test_a_token_uses_the_experts_it_is_routed_to() -> None:
    sizes = ModelShape.of_config(config_of("qwen3_moe"), "here")
    one_expert = 3 * 32 * 24
    assert sizes.num_parameters - sizes.num_active_parameters == 3 * (6 - 2) * one_expert


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size = None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"intermediate_size": "64"}, "intermediate_size = '64'"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"hidden_size": float("inf")}, "hidden_size = inf"),
        ({"vocab_size": 10**30}, "vocab_size = 1000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4'"),
        *(({"rope_scaling": {**LLAMA3, "factor": bad}}, "factor = ") for bad in (10**400, 0, -3, float("nan"))),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor = 1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, "truncate": 1}}, "truncate = 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}, ORIGINAL: None}, f"{ORIGINAL} = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, "rope_theta": 1}}, "rope_theta = 1"),
        *(
            ({"model_type": "smollm3", "no_rope_layers": bad}, "no_rope_layers = ")
            for bad in ([1, 0], [1, 0, 2], "110", {"1": 0})
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ({"rope_theta": float("nan")}, "rope_theta = nan"),
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention"]}, "layer_types ['linear_attention']"),
        ({"model_type": "qwen3_5_text", "linear_num_value_heads": 9, "linear_num_key_heads": 2}, "value_heads = 9"),
        ({"model_type": "qwen3_5_text", "full_attention_interval": 0}, "full_attention_interval = 0"),
        ({**MINIMAX, "rope_parameters": None, "rotary_dim": 300}, "rotary_dim = 300"),
        ({**GPT_OSS, "swiglu_alpha": 0}, "swiglu_alpha = 0"),
        ({**GPT_OSS, "swiglu_limit": None}, "swiglu_limit = None"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000 in its config.json: expected a number from 1 to",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 in its config.json: expected a multiple"),
        (
            {**GPT_OSS, "num_local_experts": 8, "num_experts": 4},
            "num_experts = 4 in its config.json: expected 8, as num",
        ),
        ({"model_type": "gpt2"}, "model_type 'gpt2', which the trainer does not support: expected one of"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["qwen3"]}, "model_type"),
    ],
)
def test_a_damaged_config_is_an_error_that_names_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelShape.of_config({**config_of("qwen3"), **changes}, "model.path 'x'")
    assert message in str(error.value) and "model.path 'x'" in str(error.value)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("family", [family for family in FAMILIES if not TABLE[family].has_latents])
def test_heads_of_keys_that_are_left_out_are_as_many_as_in_transformers(family: str, heads: int) -> None:
    config = {**config_of(family), "num_attention_heads": heads, "head_dim": 16}
    config.pop("num_key_value_heads", None)
    theirs = AutoConfig.for_model(**config).num_key_value_heads
    if heads % theirs:
        with pytest.raises(ConfigError, match=f"num_key_value_heads = {theirs} .*expected a multiple"):
            ModelShape.of_config(config, "here")
    else:
        assert ModelShape.of_config(config, "here").num_kv_heads == theirs


def tiny_config(family: str) -> dict[str, Any]:
    config_class, own = TINY[family]
    heads = {"num_key_value_heads": MODEL_SIZE["num_attention_heads"]} if "kv_lora_rank" in own else {}
    return config_class(**{**own, **MODEL_SIZE, **heads}).to_dict()


@pytest.mark.parametrize("value", ["absent", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_or_null_means_what_it_means_to_transformers(
    family: str, value: object, tmp_path: Path
) -> None:
    """Or it is refused: what transformers refuses no instance can serve."""
    whole = tiny_config(family)
    for key in sorted(whole.keys() - UNREAD):
        left = {} if value == "absent" else {key: None}
        config = {name: each for name, each in whole.items() if name != key} | left
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            ours = ModelShape.of_config(config, "here")
        except ConfigError:
            continue
        theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
        assert ours == ModelShape.of_config(theirs, "here"), key


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"head_dim": 3}, "rotates 3 dimensions of a head"),
        ("glm4_moe", {"head_dim": 6}, "rotates 3 dimensions of a head"),
        ("deepseek_v3", {"qk_rope_head_dim": 7, "head_dim": 7}, "rotates 7 dimensions of a head"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim = 16 in its config.json: expected qk_rope_head_dim = 8"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave = None"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob = None"),
        ("deepseek_v3", {"topk_group": None}, "topk_group = None"),
        ("qwen3_moe", {"head_dim": None}, "head_dim = None"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers 0"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types 'full_attention'"),
        ("qwen3", {"layer_types": ["full_attention"]}, "for each of num_hidden_layers = 2"),
        ("llama", {"quantization_config": []}, "quantization_config of []"),
        *(("llama", {"rope_parameters": bad}, f"rope_parameters {bad!r}") for bad in ("", 0, False, [])),
        *(
            ("llama", {"rope_parameters": {**LLAMA3, key: bad}}, f"{key} {bad!r}")
            for key in ("rope_type", "partial_rotary_factor")
            for bad in (None, "", 0, False, [])
        ),
        ("llama", {"rope_parameters": {**LLAMA3, ORIGINAL: 0}}, f"{ORIGINAL} = 0"),
    ],
)
def test_a_value_that_transformers_cannot_compute_with_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    whole = tiny_config(family)
    ModelShape.of_config(whole, "here")
    with pytest.raises(ConfigError) as error:
        ModelShape.of_config({**whole, **changes}, "here")
    assert message in str(error.value)


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(CONFIGS.keys() - OF_MORE_PARTS)),
    st.booleans(),
    st.data(),
)
def test_sizes_are_those_of_the_config(family: str, tied: bool, data: st.DataObject) -> None:
    def draw(*choices: float) -> Any:
        return data.draw(st.sampled_from(choices))

    num_kv_heads = draw(1, 2, 3)
    num_heads = num_kv_heads * draw(1, 2, 4)
    head_dim = draw(4, 16, 128)
    config = {
        "num_hidden_layers": draw(1, 2, 7),
        "hidden_size": num_heads * (width := draw(8, 12)),
        "intermediate_size": draw(48, 96),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": draw(96, 151_936),
        "rms_norm_eps": draw(1e-5, 1e-6),
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(1e4, 1e6), **SCALED.get(family, {})},
    }
    if family != "qwen2":  # which has none
        config["head_dim"] = head_dim
    moe = {"num_experts": draw(4, 8), "num_experts_per_tok": draw(2, 3), "moe_intermediate_size": draw(24, 40)}
    if family == "qwen3_moe":
        config |= {**moe, "norm_topk_prob": tied}
    if family in ("mistral", "ministral"):
        config |= NO_WINDOW
    shape = read(family, **config)
    assert shape == ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width if family == "qwen2" else head_dim,
        vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        rope=None,
        tied=tied,
        experts=Experts(*moe.values(), renormalized=tied) if family == "qwen3_moe" else None,
        added_features=frozenset({QKV_BIAS} if family == "seed_oss" else ()),
        multipliers=Multipliers(1, 1, 1, 1) if family == "granite" else None,
        query_scaling=(0.5, 8) if family == "ministral3" else None,
        unrotated_layers=frozenset(range(4, config["num_hidden_layers"] + 1, 4) if family == "smollm3" else ()),
    )
    assert shape.has(QKV_BIAS) == (family in ("qwen2", "seed_oss")) and shape.qk_norm_heads == (
        (1, 1) if family.startswith("qwen3") else (num_heads, num_kv_heads) if family == "olmo2" else None
    )


@pytest.mark.parametrize(
    ("family", "config", "found", "expected"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'", "'silu'"),
        ("qwen2", {"attention_bias": True}, "attention_bias true", "false"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias true", "false"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
            "layer_types with 'sliding_attention' and no sliding_window in use",
            "'full_attention' in every layer, or a window",
        ),
        (
            "olmo3",
            {"sliding_window": None},
            "layer_types with 'sliding_attention' and no sliding_window in use",
            "'full_attention' in every layer, or a window",
        ),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation 'silu'", "'gelu_pytorch_tanh'"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0", "none"),
        ("olmo3", {"sliding_window": 0}, "sliding_window 0", "a number from 1"),
        (
            "olmo3",
            {"layer_types": ["full_attention", "chunked_attention"], "num_hidden_layers": 2},
            "layer_types with 'chunked_attention'",
            "'full_attention' or 'sliding_attention' in every layer",
        ),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type 'dynamic'",
            "'default' or 'linear' or 'llama3' or 'yarn'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [8, 8]}},
            "linear rope scaling with mrope_section",
            "none",
        ),
        (
            "qwen3_next",
            {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types with 'sliding_attention'",
            "'linear_attention' or 'full_attention' in every layer",
        ),
        ("gpt_oss", {"num_experts_per_tok": 1}, "num_experts_per_tok 1", "a number from 2"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok 1", "a number from 2"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax'", "'sigmoid'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False", "True"),
        (
            "minimax_m2",
            {"attn_type_list": [1, 0]},
            "attn_type_list [1, 0]",
            "1 in every layer, attention to all tokens",
        ),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step 2", "1, experts in every layer"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate false", "true"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config of 'fp8'",
            "weights that are not quantized, or fp8 with a weight_block_size",
        ),
        *(
            (
                family,
                {"quantization_config": {"quant_method": method, **more}},
                f"quantization_config of '{method}'",
                held,
            )
            for family, method, more, held in (
                ("gpt_oss", "fp8", {"weight_block_size": [128, 128]}, "weights that are not quantized, or mxfp4"),
                (
                    "qwen3_moe",
                    "mxfp4",
                    {},
                    "weights that are not quantized, or fp8 with a weight_block_size",
                ),
            )
        ),
        ("granite", {"attention_out_bias": True}, "attention_out_bias true", "false"),
        *(
            (each, {"is_causal": False}, "is_causal False", "true, or no such key")
            for each in ("llama", "qwen3_5_text")
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, ORIGINAL: 64}},
            "yarn rope scaling without llama_4_scaling_beta",
            "a number",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2", "1, experts in every layer"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers [0]", "[], experts in every layer"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok 1 with norm_topk_prob true",
            "norm_topk_prob false",
        ),
    ],
)
def test_what_the_trainer_lacks_is_refused_by_name(
    family: str, config: dict[str, Any], found: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(family, **config)
    said = f"{found} in its config.json, which the trainer does not support: expected {expected}"
    assert str(refused.value).startswith("here has ") and str(refused.value).endswith(said)


@pytest.mark.parametrize("family", BESIDE_IMAGES)
def test_a_model_with_images_whose_text_model_trains_is_refused_with_the_way_to_save_it(family: str) -> None:
    text, _ = BESIDE_IMAGES[family]
    assert text in FAMILIES
    with pytest.raises(ConfigError, match=rf"'{family}'.*expected '{text}'; .*save_pretrained"):
        ModelShape.of_config({"model_type": family, "text_config": {"model_type": text}}, "here")


@pytest.mark.computes
@pytest.mark.parametrize(
    ("whole", "text", "config", "own"),
    [
        (Gemma3ForConditionalGeneration, Gemma3ForCausalLM, Gemma3Config, {}),
        (Mistral3ForConditionalGeneration, Ministral3ForCausalLM, Mistral3Config, {"model_type": "ministral3"}),
    ],
    ids=["gemma3", "mistral3"],
)
def test_the_way_to_save_a_text_model_keeps_what_it_computes(
    whole: Any, text: Any, config: Any, own: dict[str, Any], tmp_path: Path
) -> None:
    size = {**MODEL_SIZE, "head_dim": 16, **own}
    of_images = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_images |= {"image_size": 28, "patch_size": 14}
    model = whole(config(text_config=size, vision_config=of_images)).eval()
    tokens = torch.arange(3, 20)[None]
    expected = model(input_ids=tokens).logits
    inner = model.config.text_config
    inner.tie_word_embeddings = model.config.tie_word_embeddings
    alone = text(inner).eval()
    alone.model, alone.lm_head = model.model.language_model, model.lm_head
    alone.save_pretrained(tmp_path)
    assert torch.equal(text.from_pretrained(tmp_path)(input_ids=tokens).logits, expected)
    assert BESIDE_IMAGES[model.config.model_type][0] == json.loads((tmp_path / "config.json").read_text())["model_type"]


@pytest.mark.parametrize(
    ("family", "config", "window", "layers"),
    [
        ("mistral", {}, 4096, {1, 2, 3, 4, 5}),
        ("mistral", {"sliding_window": None}, None, set()),
        ("ministral3", {"rope_parameters": SCALED_ROPE, "sliding_window": 9}, 9, {1, 2, 3, 4, 5}),
        ("qwen2", {"sliding_window": 8}, None, set()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, None, set()),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 3}, 4096, {4, 5}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, **EXPERTS}, 8, {1, 2, 3, 4, 5}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, 8, {4}),
        ("olmo3", {}, 4096, {1, 2, 3, 5}),
        ("gemma3_text", {}, 4096, {1, 2, 3, 4, 5}),
        ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 8}, 8, {1, 3, 5}),
        ("olmo3", {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL, FULL, SLIDING]}, 8, {2, 5}),
        ("gpt_oss", CLAMPED_EXPERTS, 128, {1, 3, 5}),
    ],
)
def test_windows_are_those_of_transformers(
    family: str, config: dict[str, Any], window: int | None, layers: set[int]
) -> None:
    sizes = {**SIZES, "num_hidden_layers": 5, **config}
    for written in (json.loads(CONFIGS[family](**sizes).to_json_string()), {"model_type": family, **sizes}):
        shape = ModelShape.of_config(written, "here")
        assert (shape.window, shape.windowed_layers) == (window, layers)


def test_rotary_embeddings_of_layers_with_a_window_are_their_own() -> None:
    config = {**SIZES, "model_type": "olmo3", "rope_theta": 77.0, "rope_scaling": {**LLAMA3, "rope_theta": 78.0}}
    for written in (config, AutoConfig.for_model(**config).to_dict()):
        shape = ModelShape.of_config(written, "here")
        assert (shape.rope_theta, shape.rope and shape.rope.kind, shape.local_rope) == (78.0, "llama3", (5e5, None))
    with pytest.raises(ConfigError, match="has rope_parameters of other keys in its config"):
        ModelShape.of_config({**config, "rope_parameters": {"rope_type": "default"}}, "here")


@given(st.integers(1, 130), st.integers(1, 20))
def test_stages_share_all_layers_and_the_ends_have_no_more_than_the_others(num_layers: int, num_stages: int) -> None:
    stages = stage_layers(num_layers, num_stages)
    assert [layer for layers in stages for layer in layers] == list(range(num_layers)) and len(stages) == num_stages
    sizes = [len(layers) for layers in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes[0] <= sizes[-1] <= min(sizes[1:-1], default=sizes[-1])
