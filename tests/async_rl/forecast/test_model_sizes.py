"""Parameters counted from config.json equal those of transformers' models."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.errors import ConfigError
from async_rl.forecast.model_sizes import ModelSizes
from async_rl.preflight.model import FAMILIES

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    own = EXPERTS if family == "qwen3_moe" else {}
    return {**SIZES, **own, "model_type": family, **changes}


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
    assert ModelSizes.of_config(config, "here").num_parameters == num_parameters(config)


def test_what_a_config_leaves_out_is_as_in_transformers() -> None:
    config = config_of("qwen3", tie_word_embeddings=False)
    assert "head_dim" not in config
    saved = json.loads(AutoConfig.for_model(**config).to_json_string())
    assert ModelSizes.of_config(config, "here") == ModelSizes.of_config(saved, "here")


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
    assert ModelSizes.of_config(config, "here").num_parameters == 8_190_735_360


def test_a_token_uses_the_experts_it_is_routed_to() -> None:
    sizes = ModelSizes.of_config(config_of("qwen3_moe"), "here")
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
        ({"model_type": "gpt2"}, "model_type 'gpt2': expected one of"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["qwen3"]}, "model_type"),
    ],
)
def test_a_damaged_config_is_an_error_that_names_the_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelSizes.of_config({**config_of("qwen3"), **changes}, "model.path 'x'")
    assert message in str(error.value) and "model.path 'x'" in str(error.value)
