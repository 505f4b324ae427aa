"""Small real models: random Hugging Face checkpoints of each family, with a character tokenizer."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from benchmarks.common.random_model import random_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SCALED_QUERIES = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
LATENTS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
DEEPSEEKS_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
DELTA: dict[str, object] = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    # What a state gives may be nearly 0, and its norm would multiply roundings.
    "rms_norm_eps": 1e-2,
}
CLAMPED_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # Some values are beyond it.
    "swiglu_limit": 0.4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
UNGROUPED_EXPERTS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
KINDS = ["sliding_attention", "full_attention"]
"""Repeated as often as there are layers."""

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 16, **EXPERTS}),
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"head_dim": 16, "sliding_window": None}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
    "seed_oss": (SeedOssConfig, {"head_dim": 16}),
    "ministral": (MinistralConfig, {"head_dim": 16, "sliding_window": 5, "layer_types": KINDS}),
    "ministral3": (Ministral3Config, {"head_dim": 16, "rope_parameters": SCALED_QUERIES}),
    "deepseek_v3": (DeepseekV3Config, {**LATENTS, **DEEPSEEKS_EXPERTS}),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            **DEEPSEEKS_EXPERTS,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "qwen3_next": (Qwen3NextConfig, {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen3_5_text": (Qwen3_5TextConfig, DELTA),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 20}),
    "gemma3_text": (
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 5, "layer_types": KINDS, "query_pre_attn_scalar": 20},
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (Olmo3Config, {"sliding_window": 5, "layer_types": KINDS}),
    "gpt_oss": (GptOssConfig, {"head_dim": 16, "sliding_window": 5, "layer_types": KINDS, **CLAMPED_EXPERTS}),
    "minimax_m2": (MiniMaxM2Config, {"head_dim": 16, **UNGROUPED_EXPERTS}),
    "granite": (GraniteConfig, {"attention_bias": True, "mlp_bias": True, **MULTIPLIERS}),
}
CHARACTERS = string.ascii_letters + string.digits + " .,:;!?'\"+-*/=()\n"
MODEL_SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save_tokenizer(path: Path) -> None:
    """A tokenizer of one token per character: 0 is <pad>, 1 is <eos>."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(path)


def make_tiny_model(path: Path, family: str, *, tied: bool = False, seed: int = 0, **size: Any) -> Path:
    """Saves a random float32 checkpoint of `family`, one of `FAMILIES`, with its tokenizer; returns `path`."""
    settings = {**MODEL_SIZE, **size, "tie_word_embeddings": tied}
    config_class, own = FAMILIES[family]
    if "layer_types" in own:
        settings["layer_types"] = [KINDS[layer % len(KINDS)] for layer in range(settings["num_hidden_layers"])]
    if "kv_lora_rank" in own:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    model = random_model(config_class(**{**own, **settings}), seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            # Default initialisation leaves norms at 1 and biases at 0, which would hide an error in either.
            if name.endswith("A_log"):
                # States last for some rows.
                parameter.copy_(torch.randn_like(parameter) - 2)
            elif name.endswith("conv1d.weight"):
                # Of few inputs.
                parameter.copy_(0.6 * torch.randn_like(parameter))
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif name.endswith(("norm.weight", "bias")) or "layernorm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path
