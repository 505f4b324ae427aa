"""What of a config.json is not held: the trainer's models are those of transformers, or are refused by the key's name.

Also the parts of that file that are read in more than one place; for `model_shape`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from async_rl.errors import ConfigError
from async_rl.shared.layer_windows import FULL, SLIDING, unheld_windows
from async_rl.shared.model_families import (
    BESIDE_IMAGES,
    BIAS_KEYS,
    ORIGINAL,
    QUERY_BETA,
    ROPE_KEYS,
    ROPE_KINDS,
    SAME_AS,
    TABLE,
    Family,
)

UNREAD: Mapping[str, Mapping[str, Any]] = {
    "deepseek": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "minimax": {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    },
}
"""Keys of config.json that transformers does not read, by kind of experts, and the only values that it holds."""


DTYPES = ("bfloat16", "float32", "float16", "float64")
"""Of weights, by the names that config.json has for them."""

FAMILIES = tuple(TABLE)
"""`model_type` of the models that the trainer supports."""


def family_of(config: Mapping[str, Any], named: str) -> str:
    """The family, all of whose features are supported.

    Raises:
        ConfigError: it is another one, or has another feature.
    """
    name = config.get("model_type")
    family = SAME_AS.get(name, name) if isinstance(name, str) else name
    if not isinstance(family, str) or family not in FAMILIES:
        if isinstance(family, str) and family in BESIDE_IMAGES:
            text, remedy = BESIDE_IMAGES[family]
            raise ConfigError(
                f"{named} has model_type {family!r}, a model with images, which the trainer does not support: expected "
                f"{text!r}; {remedy}"
            )
        raise ConfigError(
            f"{named} has model_type {family!r}, which the trainer does not support: expected one of "
            f"{', '.join(FAMILIES)}"
        )
    for found, expected in not_held(config, TABLE[family]):
        raise ConfigError(
            f"{named} has {found} in its config.json, which the trainer does not support: expected {expected}"
        )
    return family


def not_held(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    """What of the config is not held: how it is written there, and what would be held."""
    if config.get(traits.activation_key, traits.activation[0]) not in traits.activation:
        yield f"{traits.activation_key} {config[traits.activation_key]!r}", repr(traits.activation[0])
    for name in traits.unset:
        if config.get(name):
            yield f"{name} {config[name]!r}", "none"
    for name in BIAS_KEYS:
        if config.get(name, False) is not False and name not in traits.features_of:
            yield f"{name} {json.dumps(config[name])}", "false"
    has_mxfp4 = traits.experts == "gpt_oss"
    is_held = is_mxfp4(config) if has_mxfp4 else fp8_block(config) is not None
    if (quantized := config.get("quantization_config")) not in (None, {}) and not is_held:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        held = "mxfp4" if has_mxfp4 else "fp8 with a weight_block_size"
        yield f"quantization_config of {method!r}", f"weights that are not quantized, or {held}"
    yield from unheld_windows(config, traits)
    if traits.local_theta is None:
        yield from _of_rope(config, traits, *rope_of(config, traits))
    else:
        yield from _of_ropes(config, traits)
    if traits.delta and config.get("attn_output_gate") is False:
        yield "attn_output_gate false", "true"
    if traits.experts in ("qwen", "qwen_shared"):
        yield from _of_experts(config)
    is_renormalized = traits.experts and (traits.renormalizes or config.get("norm_topk_prob", traits.experts != "qwen"))
    if is_renormalized and config.get("num_experts_per_tok") == 1:
        # The only weight would always be 1, and the router would get no gradient.
        if traits.renormalizes:
            yield "num_experts_per_tok 1", "a number from 2"
        else:
            yield "num_experts_per_tok 1 with norm_topk_prob true", "norm_topk_prob false"
    if config.get("is_causal", True) is not True:
        yield f"is_causal {config['is_causal']!r}", "true, or no such key"
    for name in ("dtype", "torch_dtype"):
        if config.get(name) is not None and str(config[name]).removeprefix("torch.") not in DTYPES:
            yield f"{name} {config[name]!r}", " or ".join(map(repr, DTYPES))
    for name, value in UNREAD.get(traits.experts or "", {}).items():
        if config.get(name, value) != value:
            yield f"{name} {config[name]!r}", repr(value)
    kinds = config.get("attn_type_list") if traits.experts == "minimax" else None
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        yield f"attn_type_list {kinds!r}", "1 in every layer, attention to all tokens"
    heads = config.get("num_attention_heads")
    if traits.has_latents and config.get("num_key_value_heads", heads) not in (None, heads):
        yield f"num_key_value_heads {config['num_key_value_heads']}", f"{heads}, as num_attention_heads"


def _of_ropes(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    """Of a family whose rotary embeddings differ by kind of layer."""
    by_kind = config.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or by_kind.keys() - {FULL, SLIDING}:
        yield "rope_parameters of other keys", f"{FULL!r} and {SLIDING!r}, each with its own"
    elif any(not isinstance(rope or {}, Mapping) for rope in (*by_kind.values(), config.get("rope_scaling"))):
        yield "rope_parameters of other values", f"{FULL!r} and {SLIDING!r}, each with its own"
    elif config.get("rope_scaling") and config.get("rope_parameters") == {}:
        yield "rope_parameters {} beside rope_scaling", "rope_scaling alone"
    else:
        for name, rope in (rope_of(config, traits), ("rope_parameters", local_rope(config, traits))):
            yield from _of_rope(config, traits, name, rope)
            if "type" in rope and "rope_type" not in rope:
                # Here transformers reads the new name only, and takes what has the old one for no scaling.
                yield f"{name} with type {rope['type']!r}", f"rope_type {rope['type']!r}"
            if rope.get("truncate", True) is not True:
                # transformers looks for it beside the kinds of layers, where it is none of its keys.
                yield f"{name} with truncate {rope['truncate']!r}", "true, or no such key"


def _of_rope(config: Mapping[str, Any], traits: Family, name: str, rope: Any) -> Iterator[tuple[str, str]]:
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
    """Rotary embeddings as the config has them, of layers without a window where it tells kinds of layers apart, and
    the name that it gives them."""
    name = "rope_parameters" if config.get("rope_scaling") in (None, {}) else "rope_scaling"
    if traits.local_theta is not None:
        by_kind = config.get("rope_parameters") or {}
        return name, {**(by_kind.get(FULL) or {}), **(config.get("rope_scaling") or {})}
    rope = config.get(name)
    return name, traits.rope if rope in (None, {}) else rope


def local_rope(config: Mapping[str, Any], traits: Family) -> dict[str, Any]:
    """Those of layers with a window, with their base."""
    theta = config.get(traits.local_theta_key or "", traits.local_theta)
    return {"rope_theta": theta, **((config.get("rope_parameters") or {}).get(SLIDING) or {})}


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


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the experts' weights of a checkpoint are in MXFP4, as gpt-oss' are."""
    quantized = config.get("quantization_config")
    return isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"


def rope_type(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _of_experts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.get("decoder_sparse_step", 1) != 1:
        yield f"decoder_sparse_step {config['decoder_sparse_step']}", "1, experts in every layer"
    if config.get("mlp_only_layers") not in (None, []):
        yield f"mlp_only_layers {config['mlp_only_layers']}", "[], experts in every layer"
