"""The parts of a model that not all models have, and how each is read from config.json; for `model_shape`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from async_rl.errors import ConfigError
from async_rl.shared.layer_windows import LINEAR
from async_rl.shared.model_families import (
    DEFAULT_QUERY_SCALAR,
    HEAD_DIM,
    MULTIPLIERS,
    ORIGINAL,
    QUERY_BETA,
    QUERY_SCALAR,
    ROPE_KINDS,
    Family,
)
from async_rl.shared.model_limits import local_rope, rope_type

FULL_INTERVAL = 4
"""Of models with gated delta nets, where config.json leaves it out: every fourth layer has attention."""
CLAMPED_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Of gpt-oss' experts, where config.json leaves them out."""
QUERY_RANK = 1536
"""Of deepseek_v3's queries, where config.json leaves q_lora_rank out; null is none."""

LARGEST_SIZE, LARGEST_NUMBER, MOST_LAYERS = 2**31 - 1, 1e30, 10_000
"""Of any one dimension, and of other numbers; larger ones, and more layers, are damaged files."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer's feed-forward part: `num_experts` of them, each token uses the `top_k` best.

    `renormalized` means that a token's `top_k` weights sum to 1; otherwise they are the scores over all experts, a
    softmax. With `grouping` they are sigmoids, as in DeepSeek-V3. The first `num_dense` layers have none.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    renormalized: bool
    grouping: "Grouping | None" = None
    shared_size: int = 0
    """Feed-forward size of what every token passes beside its experts."""
    num_dense: int = 0
    gates_shared: bool = False
    """A gate of each token multiplies what the shared part gives."""
    clamped_gate: "ClampedGate | None" = None
    """In place of SwiGLU; the layers of such experts, and their router, have biases."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """The choice of experts by DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): by score plus a bias that training does
    not change, within the `top_groups` of `num_groups` whose two best sum highest; weights are multiplied by `scale`.
    """

    num_groups: int
    top_groups: int
    scale: float


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The activation of gpt-oss' experts (arXiv 2508.10925): (up + 1) gate sigmoid(`alpha` gate), of a gate of at most
    `limit`, and of up from -`limit` to `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Latents:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): sizes of the latents of queries, None without one,
    and of keys and values; of each head's unrotated and rotated part of a query, and of its value. With `interleaved`
    neighbouring dimensions are rotated together."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def head_dim(self) -> int:
        """Of a query or key."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta nets (arXiv 2412.06464): heads, their dimensions, and the width of the convolution before them.

    `layers`, from 0, have one in place of attention. Each key head has the same number of value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: frozenset[int]

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Sizes of a key head's query, key, and values: what the convolution mixes."""
        return self.key_dim, self.key_dim, self.values_per_key * self.value_dim

    @property
    def mixed_size(self) -> int:
        return sum(self.mixed)

    @property
    def projected(self) -> tuple[int, ...]:
        """The same, and those of its values' gates, rates and decays: what the input projection makes."""
        return *self.mixed, self.values_per_key * self.value_dim, self.values_per_key, self.values_per_key


@dataclass(frozen=True, slots=True)
class Rope:
    """Scaled rotary embeddings: one of `ROPE_KINDS`, and its parameters by their names in config.json."""

    kind: str
    parameters: tuple[tuple[str, float | int | bool], ...]


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Of the embedding, of attention's scores in place of 1 / sqrt(head dimension), and of what each half of a layer
    adds; logits are divided by `logits`. With `is_rounded` that of the embedding has the model's dtype."""

    embedding: float
    attention: float
    residual: float = 1.0
    logits: float = 1.0
    is_rounded: bool = False


def damaged(named: str, key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{named} has {key} = {value!r} in its config.json: expected {expected}; download it again")


def positive(named: str, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < LARGEST_NUMBER:
        raise damaged(named, key, value, "a number above 0")
    return float(value)


def flag(named: str, key: str, config: Mapping[str, Any], *, default: bool = False) -> bool:
    value = config.get(key, default)
    if type(value) is not bool:
        raise damaged(named, key, value, "true or false")
    return value


def read_rope(config: Mapping[str, Any], traits: Family, rope: Mapping[str, Any], named: str) -> Rope | None:
    kind = str(rope_type(rope))
    if kind == "default":
        return None
    needed, possible = ROPE_KINDS[kind]
    given = {key: rope[key] for key in (*needed, *possible) if rope.get(key) is not None}
    if ORIGINAL in possible:
        # A config may have it beside these, and that one counts, unless kinds of layers have parameters of their own.
        beside = config if traits.local_theta is None else {}
        if beside.get(ORIGINAL, 1) is None:
            raise damaged(named, ORIGINAL, None, "a number above 0, or no such key")
        originals = (beside.get(ORIGINAL), given.get(ORIGINAL), config.get("max_position_embeddings"))
        given[ORIGINAL] = next((each for each in originals if each is not None), None)
    for key in (key for key in (*needed, *possible) if key in needed or key in given):
        if key == "truncate":
            flag(named, key, given)
        else:
            positive(named, key, given.get(key))
    if kind == "yarn" and rope.get("rope_theta", config.get("rope_theta")) == 1:
        raise damaged(named, "rope_theta", 1, "a number above 1")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise damaged(named, "low_freq_factor", given["low_freq_factor"], "less than its high_freq_factor")
    return Rope(kind, tuple(sorted(given.items())))


def read_multipliers(config: Mapping[str, Any], traits: Family, hidden_size: int, named: str) -> Multipliers | None:
    if traits.multiplies:
        embedding, attention, residual, logits = (positive(named, key, config.get(key, 1)) for key in MULTIPLIERS)
        return Multipliers(embedding, attention, residual, logits)
    if traits.has_scaled_embedding:
        scalar = positive(named, QUERY_SCALAR, config.get(QUERY_SCALAR, DEFAULT_QUERY_SCALAR))
        return Multipliers(hidden_size**0.5, scalar**-0.5, is_rounded=True)
    return None


def read_local_rope(config: Mapping[str, Any], traits: Family, named: str) -> tuple[float, Rope | None] | None:
    if traits.local_theta is None:
        return None
    rope = local_rope(config, traits)
    return positive(named, "rope_theta", rope["rope_theta"]), read_rope(config, traits, rope, named)


def read_latents(config: Mapping[str, Any], size: Callable[..., int], named: str) -> Latents:
    rope_dim = size("qk_rope_head_dim")
    if config.get(HEAD_DIM, rope_dim) != rope_dim:
        # transformers makes the angles for so many.
        raise damaged(named, HEAD_DIM, config[HEAD_DIM], f"qk_rope_head_dim = {rope_dim}, or no {HEAD_DIM}")
    return Latents(
        q_rank=None if config.get("q_lora_rank", 0) is None else size("q_lora_rank", default=QUERY_RANK),
        kv_rank=size("kv_lora_rank"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=size("v_head_dim"),
        interleaved=flag(named, "rope_interleave", config, default=True),
    )


def read_delta(config: Mapping[str, Any], size: Callable[..., int], named: str) -> DeltaNet:
    num_layers = size("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        interval = size("full_attention_interval", default=FULL_INTERVAL)
        kinds = [LINEAR if (layer + 1) % interval else "" for layer in range(num_layers)]
    found = DeltaNet(
        num_key_heads=size("linear_num_key_heads", default=16),
        num_value_heads=size("linear_num_value_heads", default=32),
        key_dim=size("linear_key_head_dim", default=128),
        value_dim=size("linear_value_head_dim", default=128),
        conv_width=size("linear_conv_kernel_dim", default=4),
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
    )
    if found.num_value_heads % found.num_key_heads:
        expected = f"a multiple of its linear_num_key_heads = {found.num_key_heads}"
        raise damaged(named, "linear_num_value_heads", found.num_value_heads, expected)
    return found


def read_experts(config: Mapping[str, Any], traits: Family, size: Callable[..., int], named: str) -> Experts | None:
    if traits.experts is None:
        return None
    # A checkpoint saved again by transformers 5 has another name.
    local, plain = "num_local_experts", "num_experts"
    names = {"deepseek": ("n_routed_experts", local), "gpt_oss": (local, plain), "minimax": (local, plain)}
    own, other = names.get(traits.experts, (plain, local))
    num_experts, top_k = size(own, other), size("num_experts_per_tok")
    if config.get(other, num_experts) != num_experts:
        raise damaged(named, other, config[other], f"{num_experts}, as {own}, or no such key")
    if top_k > num_experts:
        raise damaged(named, "num_experts_per_tok", top_k, f"at most its {num_experts} experts")
    if traits.experts == "gpt_oss":
        alpha, limit = (positive(named, key, config.get(key, default)) for key, default in CLAMPED_GATE.items())
        experts = Experts(num_experts, top_k, size("intermediate_size"), renormalized=True)
        return replace(experts, clamped_gate=ClampedGate(alpha, limit))
    if traits.experts == "minimax":
        experts = Experts(num_experts, top_k, size("intermediate_size"), renormalized=True)
        return replace(experts, grouping=Grouping(num_groups=1, top_groups=1, scale=1.0))
    is_renormalized = flag(named, "norm_topk_prob", config, default=traits.experts != "qwen") or traits.renormalizes
    experts = Experts(num_experts, top_k, size("moe_intermediate_size"), is_renormalized)
    if traits.experts == "qwen_shared":
        return replace(experts, shared_size=size("shared_expert_intermediate_size", default=512), gates_shared=True)
    if traits.experts == "qwen":
        return experts
    num_dense = config.get("first_k_dense_replace", 3 if traits.has_latents else 1)
    if type(num_dense) is not int or num_dense < 0:
        raise damaged(named, "first_k_dense_replace", num_dense, "a number from 0")
    default_groups = (8, 4) if traits.has_latents else (1, 1)
    groups, top_groups = (
        size(key, default=default) for key, default in zip(("n_group", "topk_group"), default_groups, strict=True)
    )
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise damaged(named, "n_group", groups, f"groups of at least 2 of n_routed_experts = {num_experts}")
    if not top_k * groups / num_experts <= top_groups <= groups:
        raise damaged(named, "topk_group", top_groups, f"enough of n_group = {groups} for {top_k} experts")
    scale = config.get("routed_scaling_factor", 2.5 if traits.has_latents else 1.0)
    return replace(
        experts,
        grouping=Grouping(groups, top_groups, positive(named, "routed_scaling_factor", scale)),
        shared_size=experts.ffn_size * size("n_shared_experts", default=1),
        num_dense=num_dense,
    )


def read_rotary_share(
    config: Mapping[str, Any], rope: Mapping[str, Any], traits: Family, head_dim: int, named: str
) -> float:
    if traits.rotary_share is None:
        return 1.0
    if share := rope.get("partial_rotary_factor") or config.get("partial_rotary_factor"):
        return float(share)
    if traits.experts == "minimax" and (rotated := config.get("rotary_dim")) is not None:
        if type(rotated) is not int or not 0 < rotated <= head_dim:
            raise damaged(named, "rotary_dim", rotated, f"a number from 1 to head_dim = {head_dim}")
        return rotated / head_dim
    return traits.rotary_share


def require_whole_groups(heads: int, kv_heads: int, named: str) -> None:
    """
    Raises:
        ConfigError: key / value heads do not divide the attention heads.
    """
    if heads % kv_heads:
        raise ConfigError(
            f"{named} has num_attention_heads = {heads} and num_key_value_heads = {kv_heads} in its config.json: "
            "expected a multiple of the latter; download it again"
        )


def require_pairs(num_rotated: int, latents: Latents | None, named: str) -> None:
    """
    Raises:
        ConfigError: rotary embeddings turn pairs of dimensions, and these are none.
    """
    if num_rotated < 2 or num_rotated % 2:
        keys = "head_dim and partial_rotary_factor" if latents is None else "qk_rope_head_dim"
        raise ConfigError(
            f"{named} rotates {num_rotated} dimensions of a head ({keys} of its config.json): expected an even number "
            "from 2; download it again"
        )


def read_query_scaling(given: Mapping[str, Any], rope: Rope | None, named: str) -> tuple[float, float]:
    """(b, n) of `ModelShape.query_scaling`."""
    original = dict(rope.parameters if rope else ()).get(ORIGINAL, given[ORIGINAL])
    return positive(named, QUERY_BETA, given[QUERY_BETA]), positive(named, ORIGINAL, original)


def read_added_features(config: Mapping[str, Any], traits: Family, named: str) -> frozenset[str]:
    """Features of `model_families` that a key of the config switches on."""
    return frozenset(
        feature
        for key, features in traits.features_of.items()
        if flag(named, key, config, default=key in traits.true)
        for feature in features
    )


NOPE_INTERVAL = 4
"""Of smollm3, where config.json leaves it out: every fourth layer has no rotary embedding."""


def read_unrotated_layers(config: Mapping[str, Any], num_layers: int, named: str) -> frozenset[int]:
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


def read_num_predictors(config: Mapping[str, Any], traits: Family) -> int:
    """Layers for multi-token prediction that a checkpoint may have after the last one."""
    found = config.get("num_mtp_modules", 0) if traits.experts == "minimax" else 0
    if traits.experts == "deepseek":
        found = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 1))
    return found if type(found) is int else 0
