"""What a model's config.json says beside its sizes: trainer and embedded engine hold it, or refuse it by name.

Read from the file, or from transformers' config class as a dict, which has the defaults too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

FULL = "full_attention"

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of llama3 rope scaling that are fixed in Megatron's RotaryEmbedding; only the factor can be set."""


def not_held(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What of the config is not held: how it is written there, and what would be held."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act {config['hidden_act']!r}", "'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            yield f"{name} true", "false"
    yield from _of_windows(config)
    yield from _of_rope(config)
    if config.get("model_type") == "qwen3_moe":
        yield from _of_experts(config)


def _of_windows(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    others = sorted(set(map(str, kinds)) - {FULL})
    if others:
        yield f"layer_types with {others[0]!r}", f"{FULL!r} in every layer"
    # Layers below the last of `max_window_layers` attend to all; a mixture of experts has the window in every layer.
    first = config.get("max_window_layers", 28) if config.get("model_type") != "qwen3_moe" else 0
    num_layers = config.get("num_hidden_layers")
    is_used = not (isinstance(first, int) and isinstance(num_layers, int)) or first < num_layers
    has_window = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    if not kinds and has_window and is_used:
        yield f"use_sliding_window true with sliding_window {config.get('sliding_window', 4096)}", "false"


def _of_rope(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{name} by layer type", "the same in every layer"
        return
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share not in (None, 1):
        yield f"partial_rotary_factor {share}", "1.0"
    if kind not in ("default", "llama3"):
        yield f"rope_type {kind!r}", "'default' or 'llama3'"
    elif kind == "llama3":
        for each, expected in LLAMA3_FIXED.items():
            if rope.get(each) != expected:
                yield f"llama3 rope scaling with {each} {rope.get(each)}", str(expected)
        if not isinstance(rope.get("factor"), int | float):
            yield f"llama3 rope scaling with factor {rope.get('factor')}", "a number"


def _of_experts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.get("decoder_sparse_step", 1) != 1:
        yield f"decoder_sparse_step {config['decoder_sparse_step']}", "1, experts in every layer"
    if config.get("mlp_only_layers"):
        yield f"mlp_only_layers {config['mlp_only_layers']}", "[], experts in every layer"
    if config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob"):
        # The only weight would always be 1, and the router would get no gradient.
        yield "num_experts_per_tok 1 with norm_topk_prob true", "norm_topk_prob false"
