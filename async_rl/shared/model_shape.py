"""A model as its config.json describes it: sizes, numbers of parameters, and which models trainer and engine hold.

The one reading of that file, without libraries of models; for pre-flight, forecasts and the trainer. What published
configs leave out has the default that transformers gives it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from async_rl.errors import ConfigError
from async_rl.shared.model_families import (
    BIAS_KEYS,
    MLP_BIAS,
    MULTIPLIERS,
    ORIGINAL,
    OUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    QUERY_BETA,
    ROPE_KEYS,
    ROPE_KINDS,
    TABLE,
    Family,
)

FAMILIES = tuple(TABLE)
"""`model_type` of the models that the trainer supports."""

MISTRALS_WINDOW = 4096
"""Where its config.json leaves it out; null is none."""

NOPE_INTERVAL = 4
"""Of smollm3, where config.json leaves it out: every fourth layer has no rotary embedding."""

LARGEST_SIZE, LARGEST_NUMBER = 2**31, 1e30
"""Of any one dimension, and of other numbers: larger ones are damaged files."""

FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of every layer's feed-forward part: `num_experts` of them, each token uses the `top_k` best.

    `renormalized` means that a token's `top_k` weights sum to 1; otherwise they are the softmax over all experts.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    renormalized: bool


@dataclass(frozen=True, slots=True)
class Rope:
    """Scaled rotary embeddings: one of `ROPE_KINDS`, and its parameters by their names in config.json."""

    kind: str
    parameters: tuple[tuple[str, float | int | bool], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Granite's: of the embedding, of attention's scores in place of 1 / sqrt(head dimension), and of what each half of
    a layer adds; logits are divided by `logits`."""

    embedding: float
    attention: float
    residual: float
    logits: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and features of one decoder-only model.

    `rope` is None for plain rotary embeddings, which `unrotated_layers` (from 1) have none of. `tied` means that the
    output layer uses the embedding's weights. `experts` replace, in every layer, one feed-forward part of `ffn_size`.
    With `gives_values` the output layer is a critic's head, which no checkpoint's config says. `added_features` are
    those that not all models of the family have. Queries at position p are multiplied by 1 + b log(1 + p // n) for
    `query_scaling` (b, n).
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    rope: Rope | None
    tied: bool
    experts: Experts | None = None
    gives_values: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    added_features: frozenset[str] = frozenset()
    multipliers: Multipliers | None = None
    query_scaling: tuple[float, float] | None = None

    @classmethod
    def of_config(cls, config: Mapping[str, Any], named: str) -> "ModelShape":
        """The model of a config.json; `named` is its place in messages.

        Raises:
            ConfigError: a family or a feature is not supported, a size is missing or no positive integer, or heads do
                not divide.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise ConfigError(
                f"{named} has model_type {family!r}, which the trainer does not support: expected one of "
                f"{', '.join(FAMILIES)}"
            )
        traits = TABLE[family]
        for found, expected in _not_held(config, traits):
            raise ConfigError(
                f"{named} has {found} in its config.json, which the trainer does not support: expected {expected}"
            )

        def size(*keys: str, default: int | None = None) -> int:
            value = next((config[key] for key in keys if config.get(key) is not None), default)
            if type(value) is not int or not 0 < value < LARGEST_SIZE:
                raise damaged(named, keys[0], value, "a number from 1")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        kv_heads = size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{named} has num_attention_heads = {heads} and num_key_value_heads = {kv_heads} in its config.json, "
                "which do not divide: download it again"
            )
        experts = None
        if family == "qwen3_moe":
            # A checkpoint saved again by transformers 5 has the second name.
            num_experts, top_k = size("num_experts", "num_local_experts"), size("num_experts_per_tok")
            if top_k > num_experts:
                raise damaged(named, "num_experts_per_tok", top_k, f"at most its {num_experts} experts")
            experts = Experts(num_experts, top_k, size("moe_intermediate_size"), _flag(named, "norm_topk_prob", config))
        _, rope = _rope(config, traits)
        theta = rope.get("rope_theta", config.get("rope_theta", traits.theta))
        return cls(
            family=family,
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", default=traits.head_dim or hidden // heads),
            vocab_size=size("vocab_size"),
            norm_eps=_positive(named, "rms_norm_eps", config.get("rms_norm_eps", traits.norm_eps)),
            rope_theta=_positive(named, "rope_theta", theta),
            rope=_scaled_rope(config, rope, named),
            tied=_flag(named, "tie_word_embeddings", config, default=traits.tied),
            experts=experts,
            unrotated_layers=_unrotated_layers(config, size("num_hidden_layers"), named),
            added_features=frozenset(
                feature
                for key, features in traits.features_of.items()
                if _flag(named, key, config, default=key in traits.true)
                for feature in features
            ),
            multipliers=Multipliers(*(_positive(named, key, config.get(key, 1)) for key in MULTIPLIERS))
            if traits.multiplies
            else None,
            query_scaling=(_positive(named, QUERY_BETA, rope[QUERY_BETA]), _positive(named, ORIGINAL, rope[ORIGINAL]))
            if traits.scales_queries
            else None,
        )

    def as_critic(self) -> "ModelShape":
        """The same layers below a critic's head."""
        return replace(self, tied=False, gives_values=True)

    def has(self, feature: str) -> bool:
        """Whether its layers have a feature of `model_families`."""
        return feature in TABLE[self.family].features or feature in self.added_features

    @property
    def qk_norm(self) -> bool:
        return self.has(QK_NORM)

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.multipliers.attention if self.multipliers else self.head_dim**-0.5

    @property
    def qkv_size(self) -> int:
        """Values that a row's queries, keys and values have in one layer."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def vocabulary_parameters(self) -> int:
        """Of the embedding, and of the output layer where it is not the same tensor."""
        return self.vocab_size * self.hidden_size

    @property
    def divided_layer_parameters(self) -> int:
        """Of one layer, those that tensor-parallel ranks divide."""
        attention = self.hidden_size * (self.qkv_size + self.num_heads * self.head_dim)
        bias = self.qkv_size if self.has(QKV_BIAS) else 0
        ffn_bias = 2 * self.ffn_size if self.has(MLP_BIAS) else 0
        return attention + bias + (0 if self.experts else 3 * self.hidden_size * self.ffn_size + ffn_bias)

    @property
    def whole_layer_parameters(self) -> int:
        """Of one layer, those that every rank of its stage has: norms, and the router of experts."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        biases = self.hidden_size * (self.has(OUT_BIAS) + self.has(MLP_BIAS))
        return norms + biases + (self.hidden_size * self.experts.num_experts if self.experts else 0)

    @property
    def expert_layer_parameters(self) -> int:
        """Of one layer, those of all its experts."""
        if self.experts is None:
            return 0
        return self.experts.num_experts * 3 * self.hidden_size * self.experts.ffn_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied head counted once."""
        layer = self.divided_layer_parameters + self.whole_layer_parameters + self.expert_layer_parameters
        vocabulary = self.vocabulary_parameters * (1 if self.tied else 2)
        return self.num_layers * layer + vocabulary + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Those that one token uses: without the experts that it is not routed to."""
        if self.experts is None:
            return self.num_parameters
        unused = 1 - self.experts.top_k / self.experts.num_experts
        return self.num_parameters - round(self.num_layers * self.expert_layer_parameters * unused)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each pipeline stage, from 0: as many in each as possible, and fewer at the ends.

    The first stage keeps the most micro-batches and the embedding, the last one computes the logits.
    """
    least, left = divmod(num_layers, num_stages)
    order = [*range(num_stages - 2, 0, -1), num_stages - 1, 0]
    larger = set(order[:left])
    first, stages = 0, []
    for stage in range(num_stages):
        stages.append(range(first, first + least + (stage in larger)))
        first = stages[-1].stop
    return stages


def damaged(named: str, key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{named} has {key} = {value!r} in its config.json: expected {expected}; download it again")


def _positive(named: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < LARGEST_NUMBER:
        raise damaged(named, key, value, "a number above 0")
    return float(value)


def _flag(named: str, key: str, config: Mapping[str, Any], *, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise damaged(named, key, value, "true or false")
    return default if value is None else value


def _scaled_rope(config: Mapping[str, Any], rope: Mapping[str, Any], named: str) -> Rope | None:
    kind = str(_rope_type(rope))
    if kind == "default":
        return None
    needed, possible = ROPE_KINDS[kind]
    given = {key: rope[key] for key in (*needed, *possible) if rope.get(key) is not None}
    if ORIGINAL in possible:
        # A config may have it beside these, and that one counts.
        given[ORIGINAL] = config.get(ORIGINAL) or given.get(ORIGINAL) or config.get("max_position_embeddings")
    for key in (key for key in (*needed, *possible) if key in needed or key in given):
        if key == "truncate":
            _flag(named, key, given)
        else:
            _positive(named, key, given.get(key))
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise damaged(named, "low_freq_factor", given["low_freq_factor"], "less than its high_freq_factor")
    return Rope(kind, tuple(sorted(given.items())))


def _unrotated_layers(config: Mapping[str, Any], num_layers: int, named: str) -> frozenset[int]:
    """Layers without rotary embeddings, from 1: of smollm3 those where `no_rope_layers` has a 0."""
    if config.get("model_type") != "smollm3":
        return frozenset()
    marks = config.get("no_rope_layers")
    if marks is None:
        interval = config.get("no_rope_layer_interval", NOPE_INTERVAL)
        if type(interval) is not int or interval < 1:
            raise damaged(named, "no_rope_layer_interval", interval, "a number from 1")
        marks = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(marks, list) or len(marks) < num_layers or any(mark not in (0, 1) for mark in marks):
        raise damaged(named, "no_rope_layers", marks, f"a 0 or 1 for each of its {num_layers} layers")
    return frozenset(layer for layer in range(1, num_layers + 1) if not marks[layer - 1])


def _not_held(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    """What of the config is not held: how it is written there, and what would be held."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act {config['hidden_act']!r}", "'silu'"
    for name in BIAS_KEYS:
        if config.get(name) and name not in traits.features_of:
            yield f"{name} true", "false"
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield f"quantization_config of {method!r}", "weights that are not quantized"
    yield from _of_windows(config)
    yield from _of_rope(config, traits)
    if config.get("model_type") == "qwen3_moe":
        yield from _of_experts(config)


def _of_windows(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = config.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    others = sorted(set(map(str, kinds)) - {FULL})
    if others:
        yield f"layer_types with {others[0]!r}", f"{FULL!r} in every layer"
    family = config.get("model_type")
    window = config.get("sliding_window", MISTRALS_WINDOW if family == "mistral" else None)
    if family in ("mistral", "ministral3") and window is not None:
        yield f"sliding_window {window}", "null"
    # Layers below the last of `max_window_layers` attend to all; other families have the window in every layer.
    first = config.get("max_window_layers", 28) if family in ("qwen2", "qwen3") else 0
    num_layers = config.get("num_hidden_layers")
    is_used = not (isinstance(first, int) and isinstance(num_layers, int)) or first < num_layers
    has_window = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    if not kinds and has_window and is_used:
        yield f"use_sliding_window true with sliding_window {config.get('sliding_window', 4096)}", "false"


def _of_rope(config: Mapping[str, Any], traits: Family) -> Iterator[tuple[str, str]]:
    name, rope = _rope(config, traits)
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        yield f"{name} by layer type", "the same in every layer"
        return
    kind = _rope_type(rope)
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share not in (None, 1):
        yield f"partial_rotary_factor {share}", "1.0"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        yield f"rope_type {kind!r}", " or ".join(map(repr, ROPE_KINDS))
        return
    needed, possible = ROPE_KINDS[kind]
    if traits.scales_queries:
        needed, possible = (*needed, ORIGINAL, QUERY_BETA), (*possible, "max_position_embeddings")
    for key in needed:
        if rope.get(key) is None:
            yield f"{kind} rope scaling without {key}", "a number"
    for key in sorted(rope.keys() - {*needed, *possible, *ROPE_KEYS}):
        if rope[key] is not None:
            yield f"{kind} rope scaling with {key}", "none"


def _rope(config: Mapping[str, Any], traits: Family) -> tuple[str, Any]:
    """Rotary embeddings as the config has them, and the name that it gives them."""
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return name, config.get(name) or traits.rope


def _rope_type(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type") or rope.get("type") or "default"


def _of_experts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if config.get("decoder_sparse_step", 1) != 1:
        yield f"decoder_sparse_step {config['decoder_sparse_step']}", "1, experts in every layer"
    if config.get("mlp_only_layers"):
        yield f"mlp_only_layers {config['mlp_only_layers']}", "[], experts in every layer"
    if config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob"):
        # The only weight would always be 1, and the router would get no gradient.
        yield "num_experts_per_tok 1 with norm_topk_prob true", "norm_topk_prob false"
