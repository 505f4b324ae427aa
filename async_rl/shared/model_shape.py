"""A model as its config.json describes it: sizes, numbers of parameters, and which models trainer and engine hold.

The one reading of that file, without libraries of models; for pre-flight, forecasts and the trainer. What published
configs leave out has the default that transformers gives it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import log
from typing import Any, NamedTuple

from async_rl.shared.layer_windows import window_of, windowed_layers
from async_rl.shared.model_families import (
    GELU,
    HEAD_DIM,
    JOINT_QK_NORM,
    KV_HEADS,
    MLP_BIAS,
    OUT_BIAS,
    OUT_GATE,
    QK_NORM,
    QKV_BIAS,
    SINKS,
    TABLE,
    Norms,
)
from async_rl.shared.model_limits import family_of, rope_of
from async_rl.shared.model_parts import (
    LARGEST_SIZE,
    MOST_LAYERS,
    DeltaNet,
    Experts,
    Latents,
    Multipliers,
    Rope,
    damaged,
    flag,
    positive,
    read_added_features,
    read_delta,
    read_experts,
    read_latents,
    read_local_rope,
    read_multipliers,
    read_num_predictors,
    read_query_scaling,
    read_rope,
    read_rotary_share,
    read_unrotated_layers,
    require_pairs,
    require_whole_groups,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and features of one decoder-only model.

    `rope` is None for plain rotary embeddings, which `unrotated_layers` (from 1) have none of. `tied` means that the
    output layer uses the embedding's weights. `experts` replace, in every layer, one feed-forward part of `ffn_size`.
    With `gives_values` the output layer is a critic's head, which no checkpoint's config says. `added_features` are
    those that not all models of the family have. Queries at position p are multiplied by 1 + b log(1 + p // n) for
    `query_scaling` (b, n). Layers in `windowed_layers` (from 1) attend to the last `window` tokens only, a token itself
    among them; with `local_rope` they have a base and scaling of their own.
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
    latents: Latents | None = None
    delta: DeltaNet | None = None
    rotary_share: float = 1.0
    window: int | None = None
    windowed_layers: frozenset[int] = frozenset()
    local_rope: tuple[float, Rope | None] | None = None
    num_predictors: int = 0
    """Layers for multi-token prediction that checkpoints may have after the last one; not trained."""

    def as_json(self) -> dict[str, Any]:
        """Its sizes and features by name, as they are read again from JSON; sets in order."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self), default=sorted))
        return found

    @classmethod
    def of_config(cls, config: Mapping[str, Any], named: str) -> "ModelShape":
        """The model of a config.json; `named` is its place in messages.

        Raises:
            ConfigError: a family or a feature is not supported, a size is missing or no positive integer, or heads do
                not divide.
        """
        traits = TABLE[family := family_of(config, named)]

        def size(*keys: str, default: int | None = None, most: int = LARGEST_SIZE) -> int:
            value = next((config[key] for key in keys if key in config), default)
            if type(value) is not int or not 0 < value <= most:
                raise damaged(named, keys[0], value, f"a number from 1 to {most}")
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        num_layers = size("num_hidden_layers", most=MOST_LAYERS)

        def heads_size(key: str, default: int | None, derived: int) -> int:
            if key in config and config[key] is None and key in traits.derived:
                return derived
            return size(key, default=default or derived)

        kv_heads = heads_size(KV_HEADS, traits.kv_heads, heads)
        require_whole_groups(heads, kv_heads, named)
        latents = read_latents(config, size, named) if traits.has_latents else None
        _, rope = rope_of(config, traits)
        head_dim = heads_size(HEAD_DIM, traits.head_dim, hidden // heads) if latents is None else latents.head_dim
        rotary_share = read_rotary_share(config, rope, traits, head_dim, named)
        require_pairs(latents.rope_dim if latents else int(head_dim * rotary_share), latents, named)
        unrotated = read_unrotated_layers(config, num_layers, named)
        experts = read_experts(config, traits, size, named)
        dense_size = experts.ffn_size if experts is not None and not traits.has_dense_size else None
        windowed = windowed_layers(config, traits, num_layers, unrotated)
        return cls(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden,
            ffn_size=size("intermediate_size", default=dense_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=size("vocab_size"),
            norm_eps=positive(named, "rms_norm_eps", config.get("rms_norm_eps", traits.norm_eps)),
            rope_theta=positive(named, "rope_theta", rope.get("rope_theta", config.get("rope_theta", traits.theta))),
            rope=(scaled := read_rope(config, traits, rope, named)),
            tied=flag(named, "tie_word_embeddings", config, default=traits.tied),
            experts=experts,
            latents=latents,
            delta=read_delta(config, size, named) if traits.delta else None,
            rotary_share=rotary_share,
            num_predictors=read_num_predictors(config, traits),
            unrotated_layers=unrotated,
            window=window_of(config, traits.windows) if windowed else None,
            windowed_layers=windowed,
            local_rope=read_local_rope(config, traits, named),
            added_features=read_added_features(config, traits, named),
            multipliers=read_multipliers(config, traits, hidden, named),
            query_scaling=read_query_scaling(rope, scaled, named) if traits.scales_queries else None,
        )

    def as_critic(self) -> "ModelShape":
        """The same layers below a critic's head."""
        return replace(self, tied=False, gives_values=True)

    def has(self, feature: str) -> bool:
        """Whether its layers have a feature of `model_families`."""
        return feature in TABLE[self.family].features or feature in self.added_features

    @property
    def qk_norm_heads(self) -> tuple[int, int] | None:
        """Heads that one norm of queries, and one of keys, is over; None without such norms."""
        if self.has(JOINT_QK_NORM):
            return self.num_heads, self.num_kv_heads
        return (1, 1) if self.has(QK_NORM) else None

    @property
    def norms(self) -> Norms:
        return TABLE[self.family].norms

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        if self.multipliers:
            return self.multipliers.attention
        yarn = dict(self.rope.parameters) if self.rope and self.latents else {}
        # DeepSeek-V3 has the rest of YaRN's factor of cosine and sine here, which covers the unrotated part, too.
        mscale = 0.1 * yarn.get("mscale_all_dim", 0) * log(max(1.0, yarn.get("factor", 1.0))) + 1
        return float(mscale**2 * self.head_dim**-0.5)

    @property
    def norm_offset(self) -> float:
        return TABLE[self.family].norm_offset

    @property
    def has_gelu(self) -> bool:
        """Whether its activation is GELU's approximation by tanh, not SiLU."""
        return TABLE[self.family].activation == GELU

    def window_of(self, layer: int) -> int | None:
        """Tokens that a layer, from 1, attends to; None if all."""
        return self.window if layer in self.windowed_layers else None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.latents.rope_dim if self.latents else int(self.head_dim * self.rotary_share)

    @property
    def kernel_dim(self) -> int:
        """Dimensions of a head for attention kernels, which take queries, keys and values of one size."""
        return max(self.head_dim, self.value_dim)

    @property
    def value_dim(self) -> int:
        return self.latents.value_dim if self.latents else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 0, has experts."""
        return self.experts is not None and layer >= self.experts.num_dense

    def has_delta(self, layer: int) -> bool:
        """Whether a layer, from 0, has a gated delta net in place of attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that attend to keys and values of all rows before."""
        return sum(not self.has_delta(layer) for layer in range(self.num_layers))

    @property
    def qkv_size(self) -> int:
        """Values that a row's queries, with their gates, keys and values have in one layer with attention."""
        num_queries = self.num_heads * (2 if self.has(OUT_GATE) else 1)
        return (num_queries + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.value_dim

    @property
    def vocabulary_parameters(self) -> int:
        """Of the embedding, and of the output layer where it is not the same tensor."""
        return self.vocab_size * self.hidden_size

    @property
    def stacked_parameters(self) -> int:
        """Of the largest tensor that has something of all experts of a layer, in checkpoints and what is published."""
        if self.experts is None or self.experts.clamped_gate is None:
            return 0
        return self.experts.num_experts * 2 * self.experts.ffn_size * self.hidden_size

    @property
    def attention_products(self) -> int:
        """Weights that a row is multiplied with in the attention, or the gated delta net, of all layers."""
        of_delta = 0
        if self.delta is not None:
            sizes = self.delta.num_key_heads * sum(self.delta.projected)
            sizes += self.delta.num_value_heads * self.delta.value_dim
            of_delta = len(self.delta.layers) * self.hidden_size * sizes
        return of_delta + self.num_attention_layers * self._layer_attention_products

    @property
    def _layer_attention_products(self) -> int:
        hidden, out = self.hidden_size, self.num_heads * self.value_dim
        if (sizes := self.latents) is None:
            return hidden * (self.qkv_size + out)
        query = (sizes.q_rank or hidden) * self.num_heads * self.head_dim + hidden * (sizes.q_rank or 0)
        keys = sizes.kv_rank * self.num_heads * (sizes.nope_dim + sizes.value_dim)
        return query + keys + hidden * (sizes.kv_rank + sizes.rope_dim + out)

    @property
    def feed_forward_products(self) -> int:
        """The same of the feed-forward parts of all layers, with the experts that a row uses."""
        if self.experts is None:
            return self.num_layers * 3 * self.hidden_size * self.ffn_size
        experts, num_dense = self.experts, min(self.experts.num_dense, self.num_layers)
        used = experts.top_k * experts.ffn_size + experts.shared_size
        of_experts = experts.num_experts + experts.gates_shared + 3 * used
        return self.hidden_size * (num_dense * 3 * self.ffn_size + (self.num_layers - num_dense) * of_experts)

    @property
    def _attention_parameters(self) -> tuple[int, int]:
        """Of one layer's attention: (those that tensor-parallel ranks divide, those that every rank has)."""
        hidden, out = self.hidden_size, self.num_heads * self.value_dim
        if (sizes := self.latents) is None:
            bias = self.qkv_size if self.has(QKV_BIAS) else 0
            bias += self.num_heads * self.has(SINKS)
            norms = sum(self.qk_norm_heads or ()) * self.head_dim
            return hidden * (self.qkv_size + out) + bias, norms + hidden * self.has(OUT_BIAS)
        query = (sizes.q_rank or hidden) * self.num_heads * self.head_dim
        keys = sizes.kv_rank * self.num_heads * (sizes.nope_dim + sizes.value_dim)
        down = hidden * (sizes.kv_rank + sizes.rope_dim) + sizes.kv_rank
        return query + keys + hidden * out, down + (sizes.q_rank or 0) * (hidden + 1)

    @property
    def _delta_parameters(self) -> tuple[int, int]:
        """The same of one layer's gated delta net."""
        assert self.delta is not None
        heads, values = self.delta.num_key_heads, self.delta.num_value_heads
        products = self.hidden_size * (heads * sum(self.delta.projected) + values * self.delta.value_dim)
        return products + heads * self.delta.mixed_size * self.delta.conv_width + 2 * values, self.delta.value_dim

    def layer_parameters(self, layer: int) -> "LayerParameters":
        """Of one layer, from 0."""
        divided, whole = self._delta_parameters if self.has_delta(layer) else self._attention_parameters
        whole += sum(name is not None for name in self.norms) * self.hidden_size
        if not self.has_experts(layer):
            bias = 2 * self.ffn_size if self.has(MLP_BIAS) else 0
            ffn = 3 * self.hidden_size * self.ffn_size
            return LayerParameters(divided + ffn + bias, whole + self.hidden_size * self.has(MLP_BIAS), 0)
        assert self.experts is not None
        divided += 3 * self.hidden_size * self.experts.shared_size
        whole += self.hidden_size * (self.experts.num_experts + self.experts.gates_shared)
        of_expert = 3 * self.hidden_size * self.experts.ffn_size
        if self.experts.clamped_gate is not None:
            whole += self.experts.num_experts
            of_expert += 2 * self.experts.ffn_size + self.hidden_size
        return LayerParameters(divided, whole, self.experts.num_experts * of_expert)

    @property
    def num_parameters(self) -> int:
        """Of the whole model, a tied head counted once."""
        layers = sum(sum(self.layer_parameters(layer)) for layer in range(self.num_layers))
        return layers + self.vocabulary_parameters * (1 if self.tied else 2) + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Those that one token uses: without the experts that it is not routed to."""
        if self.experts is None:
            return self.num_parameters
        unused = 1 - self.experts.top_k / self.experts.num_experts
        experts = sum(self.layer_parameters(layer).experts for layer in range(self.num_layers))
        return self.num_parameters - round(experts * unused)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers, as the embedded engine keeps them: both of a key's size."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.kernel_dim

    @property
    def values_per_sequence(self) -> int:
        """What an engine keeps of one sequence whatever its length: states and last rows of gated delta nets."""
        if self.delta is None:
            return 0
        of_layer = self.delta.num_value_heads * self.delta.key_dim * self.delta.value_dim
        of_layer += self.delta.num_key_heads * self.delta.mixed_size * (self.delta.conv_width - 1)
        return len(self.delta.layers) * of_layer

    @property
    def latent_values_per_token(self) -> int:
        """What vLLM keeps of one token in all layers: latents where the model has them."""
        if self.latents is None:
            return self.kv_values_per_token
        return self.num_layers * (self.latents.kv_rank + self.latents.rope_dim)


class LayerParameters(NamedTuple):
    """Numbers of parameters of one layer: those that tensor-parallel ranks divide, those that every rank of its stage
    has (norms, what makes latents, and the router of experts), and those of all its experts."""

    divided: int
    whole: int
    experts: int


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
