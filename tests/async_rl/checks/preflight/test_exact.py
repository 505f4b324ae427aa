"""Exact mode is refused where trainer and instances cannot compute the same bits, with the setting that forbids it."""

from typing import Any

import pytest

from async_rl.checks.preflight.model import ModelFiles
from async_rl.checks.preflight.train_modes import require_exact
from async_rl.errors import ConfigError
from tests.support.minimal_config import config_of

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def files_of(family: str) -> ModelFiles:
    heads = {"head_dim": 8, "num_key_value_heads": 4}
    return ModelFiles("a-model", None, {"model_type": family, **dict.fromkeys((*SIZES, *EXPERTS), 4), **heads}, {})


@pytest.mark.parametrize(
    ("sections", "family", "message"),
    [
        ({"trainer": {"device": "cuda"}}, "qwen3", "needs trainer.device = 'cpu', not 'cuda': change it"),
        ({"model": {"dtype": "bfloat16"}}, "qwen3", "needs model.dtype = 'float32', not 'bfloat16'"),
        ({"inference": {"engine": "vllm"}}, "qwen3", "needs inference.engine = 'transformers', not 'vllm'"),
        ({"trainer": {"tensor_parallel": 2}}, "qwen3", "needs trainer.tensor_parallel = 1, not 2"),
        ({"trainer": {"context_parallel": 2}}, "qwen3", "needs trainer.context_parallel = 1, not 2"),
        ({"trainer": {"pipeline_parallel": 2}}, "qwen3", "needs trainer.pipeline_parallel = 1, not 2"),
        ({}, "qwen3_5_text", "is for models without linear attention, .* 'a-model' is of 'qwen3_5_text'"),
        ({}, "qwen3_moe", "is for models without experts, .* 'a-model' is of 'qwen3_moe'"),
        ({}, "gpt_oss", "is for models without experts, .* 'a-model' is of 'gpt_oss'"),
        ({}, "minimax_m2", "is for models without experts, .* 'a-model' is of 'minimax_m2'"),
        ({}, "mistral", "is for models without windows, .* 'a-model' has sliding_window 4096"),
    ],
)
def test_what_cannot_be_exact_is_refused(sections: dict[str, Any], family: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_exact(config_of(train={"exact": True}, **sections), files_of(family))
    require_exact(config_of(train={"exact": False}, **sections), files_of(family))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_one_rank_in_float32_on_a_cpu_is_exact(family: str) -> None:
    require_exact(config_of(train={"exact": True}, trainer={"num_processes": 2}), files_of(family))
    require_exact(config_of(train={"exact": True}, rollout={"program": "command:agent"}), files_of(family))
