"""The names of the tensors that a checkpoint's layers must have, by its config.json."""

from collections.abc import Iterator

from async_rl.shared.model_families import (
    JOINT_QK_NORM,
    MLP_BIAS,
    OUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    SINKS,
    TABLE,
    ExpertNames,
)
from async_rl.shared.model_shape import ModelShape

Forms = tuple[tuple[str, ...], ...]
"""Names, of which a layer has all of one form or all of another."""


def names_in_layer(shape: ModelShape, layer: int) -> Iterator[Forms]:
    """What a layer, from 0, has beside what others may have, without the layer's prefix."""
    yield (tuple(f"{norm}.weight" for norm in shape.norms if norm),)
    yield from _attention(shape, layer)
    names = TABLE[shape.family].expert_names
    if not shape.has_experts(layer):
        yield from _linear("mlp", ("gate_proj", "up_proj", "down_proj"), shape.has(MLP_BIAS))
    elif TABLE[shape.family].experts == "gpt_oss":
        values = ("experts.gate_up_proj", "experts.down_proj", "router.weight")
        yield ((*(f"mlp.{name}" for name in values), "mlp.router.bias", *(f"mlp.{name}_bias" for name in values[:2])),)
    else:
        yield from _experts(shape, names)


def _attention(shape: ModelShape, layer: int) -> Iterator[Forms]:
    if shape.has_delta(layer):
        yield (tuple(f"linear_attn.{name}" for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")),)
        yield (("linear_attn.out_proj.weight",),)
        yield tuple(
            tuple(f"linear_attn.in_proj_{part}.weight" for part in parts)
            for parts in (("qkvz", "ba"), ("qkv", "z", "b", "a"))
        )
        return
    own: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    if (sizes := shape.latents) is not None:
        own = ("q_proj",) if sizes.q_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
        own += ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    yield from _linear("self_attn", own, shape.has(QKV_BIAS))
    yield from _linear("self_attn", ("o_proj",), shape.has(OUT_BIAS))
    if shape.has(QK_NORM) or shape.has(JOINT_QK_NORM):
        yield from _linear("self_attn", ("q_norm", "k_norm"), has_bias=False)
    if shape.has(SINKS):
        yield (("self_attn.sinks",),)


def _experts(shape: ModelShape, names: ExpertNames) -> Iterator[Forms]:
    assert shape.experts is not None
    matrices = (names.gate, names.up, names.down)
    each = range(shape.experts.num_experts)
    apart = tuple(f"{names.part}.experts.{number}.{name}.weight" for number in each for name in matrices)
    yield apart, tuple(f"{names.part}.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    yield ((f"{names.part}.gate.weight",),)
    if shape.experts.grouping is not None:
        yield ((f"{names.part}.{names.choice_bias}",),)
    if shape.experts.shared_size:
        part = "shared_expert" if shape.experts.gates_shared else "shared_experts"
        yield from _linear(f"{names.part}.{part}", ("gate_proj", "up_proj", "down_proj"), has_bias=False)
    if shape.experts.gates_shared:
        yield ((f"{names.part}.shared_expert_gate.weight",),)


def _linear(part: str, names: tuple[str, ...], has_bias: bool) -> Iterator[Forms]:
    yield (tuple(f"{part}.{name}.{end}" for name in names for end in ("weight", "bias")[: 1 + has_bias]),)
