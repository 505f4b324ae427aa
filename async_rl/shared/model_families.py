"""The families of models that the trainer holds, a row each: what their layers have, what config.json leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

QKV_BIAS, OUT_BIAS, MLP_BIAS, QK_NORM = "qkv_bias", "out_bias", "mlp_bias", "qk_norm"
"""Features of layers: biases of queries, keys and values, of attention's output, of the feed-forward part's layers, and
norms of each head's queries and keys."""

OUT_GATE, NORMS_FROM_ONE = "out_gate", "norms_from_one"
"""Gates of attention's output, made with the queries; and norms that multiply by 1 + w."""

ORIGINAL: Final = "original_max_position_embeddings"
QUERY_BETA: Final = "llama_4_scaling_beta"


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        head_dim, kv_heads: head_dim and num_key_value_heads where config.json leaves them out; None divides the hidden
            size among the heads, and takes as many as heads.
        derived: keys of these two that it may have as null, with the same meaning.
        norm_eps, theta, tied: rms_norm_eps, rope_theta, and tie_word_embeddings, where it leaves them out.
        rope: its rotary embeddings where it leaves them out.
        features: what all of its models have.
        features_of: what those have in whose config.json a key is true.
        true: keys of `features_of` that are true where it leaves them out.
        multiplies: has Granite's four multipliers.
        scales_queries: multiplies queries by a logarithm of their position, as Llama 4 does.
        experts: "qwen" has Qwen3-MoE's, in every layer, "qwen_shared" also one that all tokens pass, through a gate;
            "deepseek" has DeepSeek-V3's, after the first layers.
        delta: has gated delta nets in place of attention in most layers: "by_head" has their projections in two tensors
            that are ordered by key head, "apart" those of each kind apart.
        has_latents: has multi-head latent attention.
        rope_ignored: keys of its rotary embeddings that say nothing about text.
        rotary_share: partial_rotary_factor where config.json leaves it out; None where transformers reads none.
    """

    head_dim: int | None = None
    kv_heads: int | None = None
    derived: frozenset[str] = frozenset()
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    tied: bool = False
    rope: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    features_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    true: frozenset[str] = frozenset()
    multiplies: bool = False
    scales_queries: bool = False
    experts: Literal["qwen", "qwen_shared", "deepseek"] | None = None
    delta: Literal["by_head", "apart"] | None = None
    has_latents: bool = False
    rotary_share: float | None = None
    rope_ignored: frozenset[str] = frozenset()


HEAD_DIM, KV_HEADS = "head_dim", "num_key_value_heads"

_ATTENTION: Final = {"attention_bias": frozenset({QKV_BIAS, OUT_BIAS})}
_BOTH: Final = {**_ATTENTION, "mlp_bias": frozenset({MLP_BIAS})}
_MINISTRAL: Final = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    QUERY_BETA: 0.1,
}

TABLE: Final[Mapping[str, Family]] = {
    "qwen3": Family(
        head_dim=128,
        kv_heads=32,
        derived=frozenset({KV_HEADS}),
        features=frozenset({QK_NORM}),
        features_of=_ATTENTION,
    ),
    "qwen3_moe": Family(kv_heads=4, features=frozenset({QK_NORM}), features_of=_ATTENTION, experts="qwen"),
    "qwen2": Family(kv_heads=32, derived=frozenset({KV_HEADS}), features=frozenset({QKV_BIAS})),
    "llama": Family(derived=frozenset({HEAD_DIM, KV_HEADS}), features_of=_BOTH),
    "mistral": Family(kv_heads=8, derived=frozenset({HEAD_DIM})),
    "ministral3": Family(head_dim=128, kv_heads=8, norm_eps=1e-5, rope=_MINISTRAL, scales_queries=True),
    "smollm3": Family(kv_heads=4, derived=frozenset({KV_HEADS}), theta=2e6, tied=True, features_of=_BOTH),
    "seed_oss": Family(
        head_dim=128,
        kv_heads=8,
        derived=frozenset({HEAD_DIM, KV_HEADS}),
        features_of={
            "attention_bias": frozenset({QKV_BIAS}),
            "attention_out_bias": frozenset({OUT_BIAS}),
            "mlp_bias": frozenset({MLP_BIAS}),
        },
        true=frozenset({"attention_bias"}),
    ),
    "granite": Family(derived=frozenset({KV_HEADS}), features_of=_BOTH, multiplies=True),
    "deepseek_v3": Family(kv_heads=128, derived=frozenset({KV_HEADS}), experts="deepseek", has_latents=True),
    "glm4_moe": Family(
        kv_heads=8,
        norm_eps=1e-5,
        features_of={"attention_bias": frozenset({QKV_BIAS}), "use_qk_norm": frozenset({QK_NORM})},
        experts="deepseek",
        rotary_share=0.5,
    ),
    # Their checkpoints may have layers for multi-token prediction under names of their own ("mtp.").
    "qwen3_next": Family(
        head_dim=256,
        kv_heads=2,
        features=frozenset({QK_NORM, OUT_GATE, NORMS_FROM_ONE}),
        features_of=_ATTENTION,
        experts="qwen_shared",
        delta="by_head",
        rotary_share=0.25,
    ),
    "qwen3_5_text": Family(
        head_dim=256,
        kv_heads=4,
        features=frozenset({QK_NORM, OUT_GATE, NORMS_FROM_ONE}),
        features_of=_ATTENTION,
        delta="apart",
        rotary_share=0.25,
        rope_ignored=frozenset({"mrope_section", "mrope_interleaved"}),
    ),
}
"""By `model_type`."""

SAME_AS: Final = {"kimi_k2": "deepseek_v3"}
"""Names that checkpoints give to another family's architecture."""

BIAS_KEYS: Final = ("attention_bias", "attention_out_bias", "mlp_bias")
"""Keys of config.json that a family without them in `features_of` must not have set."""

MULTIPLIERS: Final = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's keys, each 1 where config.json leaves it out."""

ROPE_KINDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "yarn": (
        ("factor",),
        (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Kinds of rotary embeddings whose angles depend on the position only: the keys that each needs, and may have."""

ROPE_KEYS: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""What any of them may have."""
