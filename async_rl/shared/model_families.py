"""The families of models that the trainer holds, a row each: what their layers have, what config.json leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

QKV_BIAS, OUT_BIAS, MLP_BIAS = "qkv_bias", "out_bias", "mlp_bias"
"""Features of layers: biases of queries, keys and values, of attention's output, of the feed-forward part's layers."""

QK_NORM, JOINT_QK_NORM = "qk_norm", "joint_qk_norm"
"""Norms of queries and keys: of each head's, or one of all heads' together."""

Norms = tuple[str | None, str | None, str | None, str | None]
"""Names in checkpoints of a layer's norms: of what attention reads and adds to the residual stream, and of what the
feed-forward part reads and adds; None where there is none."""

NORMS_BEFORE: Final[Norms] = ("input_layernorm", None, "post_attention_layernorm", None)
NORMS_AFTER: Final[Norms] = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND: Final[Norms] = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

SILU: Final = ("silu", "swish")
GELU: Final = ("gelu_pytorch_tanh",)
"""Activations by transformers' names."""

OUT_GATE = "out_gate"
"""Gates of attention's output, made with the queries."""

SINKS = "sinks"
"""A learned logit per query head that joins the softmax's denominator, as a key without a value."""

ORIGINAL: Final = "original_max_position_embeddings"
QUERY_BETA: Final = "llama_4_scaling_beta"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names in checkpoints of a layer with experts: of all of it, of the bias that experts are chosen by, and of the
    matrices of each expert."""

    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    choice_bias: str = "gate.e_score_correction_bias"


MIXTRALS: Final = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")


@dataclass(frozen=True, slots=True)
class Windows:
    """How a family's layers get a window: layers attend to that many of the last tokens only.

    Attributes:
        size: sliding_window where config.json leaves it out.
        default: layers without one where config.json does not list them: None, no layer; a number, each so manieth.
            "last" has windows in the layers after max_window_layers only, "unrotated" in those that are not rotated.
        by_layer: layer_types counts.
        switched: only with use_sliding_window.
        is_pattern_read: sliding_window_pattern is the number of `default`, where config.json has it.
    """

    size: int | None
    default: int | Literal["last", "unrotated"] | None = None
    by_layer: bool = True
    switched: bool = False
    is_pattern_read: bool = False


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
            "deepseek" has DeepSeek-V3's, after the first layers; "gpt_oss" has gpt-oss', in every layer; "minimax"
            DeepSeek-V3's without groups, in every layer.
        renormalizes: the weights of a token's experts sum to 1 whatever norm_topk_prob is.
        has_dense_size: its config has an intermediate_size, whether a layer uses it or not.
        expert_names: theirs, but for gpt-oss.
        delta: has gated delta nets in place of attention in most layers: "by_head" has their projections in two tensors
            that are ordered by key head, "apart" those of each kind apart.
        has_latents: has multi-head latent attention.
        rope_ignored: keys of its rotary embeddings that say nothing about text.
        rotary_share: partial_rotary_factor where config.json leaves it out; None where transformers reads none.
        norms: those of its layers.
        norm_offset: what norms add to their weights.
        activation, activation_key: names of the one that its feed-forward parts have, and the key that has it.
        has_scaled_embedding: multiplies the embedding by the root of the hidden size, rounded to the model's dtype, and
            attention's scores by that of 1 / query_pre_attn_scalar.
        unset: keys that config.json must leave out, or have false or null.
        windows: how layers get windows; None where transformers reads none.
        local_theta: rope_theta of layers with a window, where config.json leaves it out, in families whose rotary
            embeddings differ by kind of layer; None in others.
        local_theta_key: what config.json also calls that.
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
    experts: Literal["qwen", "qwen_shared", "deepseek", "gpt_oss", "minimax"] | None = None
    renormalizes: bool = False
    has_dense_size: bool = True
    expert_names: ExpertNames = ExpertNames()
    delta: Literal["by_head", "apart"] | None = None
    has_latents: bool = False
    rotary_share: float | None = None
    rope_ignored: frozenset[str] = frozenset()
    norms: Norms = NORMS_BEFORE
    norm_offset: float = 0.0
    activation: tuple[str, ...] = SILU
    activation_key: str = "hidden_act"
    has_scaled_embedding: bool = False
    unset: tuple[str, ...] = ()
    windows: Windows | None = None
    local_theta: float | None = None
    local_theta_key: str | None = None


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
_GPT_OSS: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    ORIGINAL: 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}

_QWEN3_5 = Family(
    head_dim=256,
    kv_heads=4,
    features=frozenset({QK_NORM, OUT_GATE}),
    norm_offset=1.0,
    features_of=_ATTENTION,
    delta="apart",
    rotary_share=0.25,
    rope_ignored=frozenset({"mrope_section", "mrope_interleaved"}),
)

TABLE: Final[Mapping[str, Family]] = {
    "qwen3": Family(
        head_dim=128,
        kv_heads=32,
        derived=frozenset({KV_HEADS}),
        features=frozenset({QK_NORM}),
        features_of=_ATTENTION,
        windows=Windows(4096, "last", switched=True),
    ),
    "qwen3_moe": Family(
        kv_heads=4,
        features=frozenset({QK_NORM}),
        features_of=_ATTENTION,
        experts="qwen",
        windows=Windows(4096, by_layer=False, switched=True),
    ),
    "qwen2": Family(
        kv_heads=32,
        derived=frozenset({KV_HEADS}),
        features=frozenset({QKV_BIAS}),
        windows=Windows(4096, "last", switched=True),
    ),
    "llama": Family(derived=frozenset({HEAD_DIM, KV_HEADS}), features_of=_BOTH),
    "mistral": Family(kv_heads=8, derived=frozenset({HEAD_DIM}), windows=Windows(4096, by_layer=False)),
    "ministral": Family(kv_heads=8, derived=frozenset({HEAD_DIM}), windows=Windows(4096)),
    "ministral3": Family(
        head_dim=128,
        kv_heads=8,
        norm_eps=1e-5,
        rope=_MINISTRAL,
        scales_queries=True,
        windows=Windows(None, by_layer=False),
    ),
    "smollm3": Family(
        kv_heads=4,
        derived=frozenset({KV_HEADS}),
        theta=2e6,
        tied=True,
        features_of=_BOTH,
        windows=Windows(None, "unrotated", switched=True),
    ),
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
        features=frozenset({QK_NORM, OUT_GATE}),
        norm_offset=1.0,
        features_of=_ATTENTION,
        experts="qwen_shared",
        delta="by_head",
        rotary_share=0.25,
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(_QWEN3_5, kv_heads=2, experts="qwen_shared", renormalizes=True, has_dense_size=False),
    "gpt_oss": Family(
        head_dim=64,
        kv_heads=8,
        norm_eps=1e-5,
        theta=150_000.0,
        rope=_GPT_OSS,
        features=frozenset({SINKS}),
        features_of=_ATTENTION,
        true=frozenset({"attention_bias"}),
        experts="gpt_oss",
        renormalizes=True,
        windows=Windows(128, 2),
    ),
    "minimax_m2": Family(
        head_dim=128,
        kv_heads=8,
        theta=5e6,
        features=frozenset({JOINT_QK_NORM}),
        experts="minimax",
        renormalizes=True,
        expert_names=MIXTRALS,
        rotary_share=1.0,
    ),
    "olmo2": Family(norm_eps=1e-5, features=frozenset({JOINT_QK_NORM}), features_of=_ATTENTION, norms=NORMS_AFTER),
    "olmo3": Family(
        norm_eps=1e-5,
        theta=5e5,
        features=frozenset({JOINT_QK_NORM}),
        features_of=_ATTENTION,
        norms=NORMS_AFTER,
        windows=Windows(4096, 4),
        local_theta=5e5,
    ),
    "gemma3_text": Family(
        head_dim=256,
        kv_heads=4,
        theta=1e6,
        tied=True,
        features=frozenset({QK_NORM}),
        features_of=_ATTENTION,
        norms=NORMS_AROUND,
        norm_offset=1.0,
        activation=GELU,
        activation_key="hidden_activation",
        has_scaled_embedding=True,
        unset=("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
        windows=Windows(4096, 6, is_pattern_read=True),
        local_theta=1e4,
        local_theta_key="rope_local_base_freq",
    ),
}
"""By `model_type`."""

SAME_AS: Final = {"kimi_k2": "deepseek_v3"}
"""Names that checkpoints give to another family's architecture."""

SAVE_TEXT: Final = (
    "save its text model with transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(..., "
    "save_original_format=False)"
)
_PUT_TOGETHER: Final = (
    "load it as {whole} with transformers, set the tie_word_embeddings of its text_config to its own, put its "
    "model.language_model and lm_head in place of model and lm_head of {text}(text_config), and save_pretrained that"
)
BESIDE_IMAGES: Final[Mapping[str, tuple[str, str]]] = {
    "qwen3_5": ("qwen3_5_text", SAVE_TEXT),
    "qwen3_5_moe": ("qwen3_5_moe_text", SAVE_TEXT),
    "gemma3": (
        "gemma3_text",
        _PUT_TOGETHER.format(whole="Gemma3ForConditionalGeneration", text="Gemma3ForCausalLM"),
    ),
    "mistral3": (
        "ministral3",
        _PUT_TOGETHER.format(whole="Mistral3ForConditionalGeneration", text="Ministral3ForCausalLM"),
    ),
}
"""Names of models with images: that of the text model in them, in `TABLE`, and how it is saved alone."""

BIAS_KEYS: Final = ("attention_bias", "attention_out_bias", "mlp_bias")
"""Keys of config.json that a family without them in `features_of` must not have set."""

QUERY_SCALAR: Final = "query_pre_attn_scalar"
DEFAULT_QUERY_SCALAR: Final = 256

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
