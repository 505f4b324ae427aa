"""The shape of a model is read from its config alone, and what the trainer cannot train is refused by name."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from async_rl.errors import ConfigError
from trainer.model.shape import Experts, ModelShape, find_checkpoint, read_model_shape

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(family: str, **config: Any) -> ModelShape:
    with TemporaryDirectory() as path:
        CONFIGS[family](**config).save_pretrained(path)
        return read_model_shape(Path(path))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.booleans(), st.data())
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
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(1e4, 1e6)},
    }
    if family != "qwen2":  # which has none
        config["head_dim"] = head_dim
    moe = {"num_experts": draw(4, 8), "num_experts_per_tok": draw(2, 3), "moe_intermediate_size": draw(24, 40)}
    if family == "qwen3_moe":
        config |= {**moe, "norm_topk_prob": tied}
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
        rope_factor=None,
        tied=tied,
        experts=Experts(*moe.values(), renormalized=tied) if family == "qwen3_moe" else None,
    )
    assert shape.qkv_bias == (family == "qwen2") and shape.qk_norm == family.startswith("qwen3")


def test_llama3_scaling_is_its_factor() -> None:
    shape = read("llama", rope_parameters=LLAMA3)
    assert (shape.rope_factor, shape.rope_theta) == (8.0, 5e5)


@pytest.mark.parametrize(
    ("family", "config", "found"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias true, expected false"),
        ("llama", {"mlp_bias": True}, "mlp_bias true, expected false"),
        ("qwen3", {"attention_bias": True}, "attention_bias true, expected false"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2},
            "layer_types with 'sliding_attention', expected 'full_attention' in every layer",
        ),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type 'linear'"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0, expected 1.0"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor 8.0, expected 4.0"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings 4096, expected 8192",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2, expected 1, experts in every layer"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\], expected \[\], experts in every layer"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "expected norm_topk_prob false"),
    ],
)
def test_what_the_trainer_lacks_is_refused_by_name(family: str, config: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=f"does not support the model in .*: .*{found}"):
        read(family, **config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt2"}', "model_type 'gpt2', expected one of "),
        ('{"model_type": "unheard of"}', "cannot read the model config in "),
        ("not JSON", "cannot read the model config in "),
        ("{}", "cannot read the model config in "),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_shape(tmp_path)


def test_a_checkpoint_is_a_directory_with_a_config_or_the_name_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give a Hugging Face checkpoint directory"):
        find_checkpoint(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert find_checkpoint(str(tmp_path)) == tmp_path
    for neither in (str(tmp_path / "missing"), "no/such/model", "owner/not-in-the-cache"):
        with pytest.raises(ConfigError, match="is neither a directory nor a model that can be fetched from the hub"):
            find_checkpoint(neither)
