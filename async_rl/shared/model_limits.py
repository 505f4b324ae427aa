"""What of a config.json is not held: the trainer's models are those of transformers, or are refused by the key's name.

Also the parts of that file that are read in more than one place; for `model_shape`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.shared.model_families import BIAS_KEYS, ORIGINAL, QUERY_BETA, ROPE_KEYS, ROPE_KINDS, Family

DEEPSEEKS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of DeepSeek-V3's config.json that transformers does not read, and the only values that it holds."""

MISTRALS_WINDOW = 4096
"""Where its config.json leaves it out; null is none."""

FULL, LINEAR = "full_attention", "linear_attention"


def not_held(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    """What of the config is not held: how it is written there, and what would be held."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act {config['hidden_act']!r}", "'silu'"
    for name in BIAS_KEYS:
        if config.get(name, False) is not False and name not in traits.features_of:
            yield f"{name} {json.dumps(config[name])}", "false"
    if (quantized := config.get("quantization_config")) not in (None, {}) and fp8_block(config) is None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield f"quantization_config of {method!r}", "weights that are not quantized, or fp8 with a weight_block_size"
    yield from _of_windows(config, traits)
    yield from _of_rope(config, traits)
    if traits.experts in ("qwen", "qwen_shared"):
        yield from _of_experts(config)
    is_renormalized = traits.experts and config.get("norm_topk_prob", traits.experts != "qwen")
    if is_renormalized and config.get("num_experts_per_tok") == 1:
        # The only weight would always be 1, and the router would get no gradient.
        yield "num_experts_per_tok 1 with norm_topk_prob true", "norm_topk_prob false"
    if traits.experts == "deepseek":
        for name, value in DEEPSEEKS.items():
            if config.get(name, value) != value:
                yield f"{name} {config[name]!r}", repr(value)
    heads = config.get("num_attention_heads")
    if traits.has_latents and config.get("num_key_value_heads", heads) not in (None, heads):
        yield f"num_key_value_heads {config['num_key_value_heads']}", f"{heads}, as num_attention_heads"


def _of_windows(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    kinds, num_layers = config.get("layer_types"), config.get("num_hidden_layers")
    held = {FULL, LINEAR} if traits.delta else {FULL}
    either = f"{LINEAR!r} or {FULL!r}" if traits.delta else repr(FULL)
    others = sorted(set(map(str, kinds)) - held) if isinstance(kinds, list) else []
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        yield f"layer_types {kinds!r}", f"{either} for each of num_hidden_layers = {num_layers!r}, or none"
    elif others:
        yield f"layer_types with {others[0]!r}", f"{either} in every layer"
    if traits.delta and config.get("attn_output_gate") is False:
        yield "attn_output_gate false", "true"
    family = config.get("model_type")
    window = config.get("sliding_window", MISTRALS_WINDOW if family == "mistral" else None)
    if family in ("mistral", "ministral3") and window is not None:
        yield f"sliding_window {window}", "null"
    # Layers below the last of `max_window_layers` attend to all; other families have the window in every layer.
    first = config.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    is_used = not (isinstance(first, int) and isinstance(num_layers, int)) or first < num_layers
    has_window = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    if not kinds and has_window and is_used:
        yield f"use_sliding_window true with sliding_window {config.get('sliding_window', 4096)}", "false"


def _of_rope(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    name, rope = rope_of(config, traits)
    if not isinstance(rope, Mapping):
        yield f"{name} {rope!r}", "an object"
        return
    if any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{name} by layer type", "the same in every layer"
        return
    kind = rope_type(rope)
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not _is_share(share) or (traits.rotary_share is None and share != 1):
        yield f"partial_rotary_factor {share!r}", "1.0"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        yield f"rope_type {kind!r}", " or ".join(map(repr, ROPE_KINDS))
        return
    needed, possible = ROPE_KINDS[kind]
    if traits.scales_queries:
        needed, possible = (*needed, ORIGINAL, QUERY_BETA), (*possible, "max_position_embeddings")
    for key in needed:
        if rope.get(key) is None:
            yield f"{kind} rope scaling without {key}", "a number"
    for key in sorted(rope.keys() - {*needed, *possible, *ROPE_KEYS, *traits.rope_ignored}):
        if rope[key] is not None:
            yield f"{kind} rope scaling with {key}", "none"


def rope_of(config: Mapping[str, Any], traits: Family) -> tuple[str, Any]:
    """Rotary embeddings as the config has them, and the name that it gives them."""
    name = "rope_parameters" if config.get("rope_scaling") in (None, {}) else "rope_scaling"
    rope = config.get(name)
    return name, traits.rope if rope in (None, {}) else rope


def _is_share(share: object) -> bool:
    return type(share) in (int, float) and 0 < float(str(share)) <= 1


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a checkpoint in fp8; None for one that is not in it."""
    quantized = config.get("quantization_config")
    if not isinstance(quantized, Mapping) or quantized.get("quant_method") != "fp8":
        return None
    block = quantized.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        return None
    return block[0], block[1]


def rope_type(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _of_experts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.get("decoder_sparse_step", 1) != 1:
        yield f"decoder_sparse_step {config['decoder_sparse_step']}", "1, experts in every layer"
    if config.get("mlp_only_layers") not in (None, []):
        yield f"mlp_only_layers {config['mlp_only_layers']}", "[], experts in every layer"
