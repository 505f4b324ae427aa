"""Sizes and numbers of parameters of a model, from its config.json; no weights and no libraries of models are needed.

For `async_rl.forecast`. `trainer.model.shape` reads the same file through transformers, which knows every default;
here only the families of `async_rl.preflight.model` and what their published configs leave out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.preflight.model import FAMILIES

DEFAULT_HEAD_DIM = {"qwen3": 128, "qwen3_moe": 128}
"""Where config.json leaves it out; the other families divide the hidden size among the heads."""

LARGEST_SIZE = 2**31
"""Of any one dimension: larger ones are damaged files, and their products would be no numbers to show."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of every layer; a token uses `top_k` of them, each of `ffn_size`."""

    num_experts: int
    top_k: int
    ffn_size: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of one decoder-only model; `experts` replace the feed-forward part of every layer."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    experts: ExpertSizes | None

    @classmethod
    def of_config(cls, config: Mapping[str, Any], named: str) -> "ModelSizes":
        """The sizes in a config.json; `named` is its place in messages.

        Raises:
            ConfigError: the family is not supported, a size is missing or no positive integer, or heads do not divide.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"{named} has model_type {family!r}: expected one of {', '.join(FAMILIES)}")

        def size(*keys: str, default: int | None = None) -> int:
            value = next((config[key] for key in keys if config.get(key) is not None), default)
            if type(value) is not int or not 0 < value < LARGEST_SIZE:
                raise ConfigError(
                    f"{named} has {keys[0]} = {value!r} in its config.json: expected a number from 1; download it again"
                )
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
            num_experts = size("num_experts", "num_local_experts")
            experts = ExpertSizes(num_experts, size("num_experts_per_tok"), size("moe_intermediate_size"))
        return cls(
            family=family,
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            ffn_size=size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", default=DEFAULT_HEAD_DIM.get(str(family), hidden // heads)),
            vocab_size=size("vocab_size"),
            tied=config.get("tie_word_embeddings") is True,
            experts=experts,
        )

    @property
    def has_qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

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
        bias = self.qkv_size if self.family == "qwen2" else 0
        return attention + bias + (0 if self.experts else 3 * self.hidden_size * self.ffn_size)

    @property
    def whole_layer_parameters(self) -> int:
        """Of one layer, those that every rank of its stage has: norms, and the router of experts."""
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_qk_norm else 0)
        return norms + (self.hidden_size * self.experts.num_experts if self.experts else 0)

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
