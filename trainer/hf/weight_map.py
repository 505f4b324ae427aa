"""Names, shapes and owners of all weights, Hugging Face <-> Megatron; for loading, publishing and saving.

Shape legend: V vocabulary, H hidden size, A query heads, K key / value heads, D head dimension, F feed-forward size, E
experts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import torch

from async_rl.shared.model_families import MLP_BIAS, OUT_BIAS, OUT_GATE, QKV_BIAS, SINKS, TABLE
from async_rl.shared.model_shape import ModelShape, stage_layers
from trainer.hf.fusions import ByHead, Fusion, SlicedQKV, Stacked, Transposed, block_sizes
from trainer.parallel import Parallel

EMBEDDING = "model.embed_tokens.weight"
VALUE_HEAD = "score.weight"
"""As reward models have it (AutoModelForSequenceClassification with one label)."""
ROWS, COLUMNS = 0, 1
"""The dimension of each Hugging Face tensor along which tensor-parallel ranks divide it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ranks that divide a model along each axis; all 1 is a whole model on one rank.

    Each rank of a pipeline has `num_chunks` parts of the layers.
    """

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    num_chunks: int = 1

    @staticmethod
    def of(parallel: Parallel) -> "Layout":
        return Layout(parallel.tp_size, parallel.pp_size, parallel.ep_size, parallel.num_chunks)

    def name_in(self, chunk: int, name: str) -> str:
        """The name on its rank of a parameter that a chunk has under `name`."""
        return name if self.num_chunks == 1 else f"chunks.{chunk}.{name}"


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One Megatron parameter and the Hugging Face tensors that it holds, in the order `fusion` takes them.

    `megatron_name` is its name on the ranks that have it: those of pipeline stage `stage` and, for an expert, of
    expert-parallel rank `ep_rank`. An expert is one of the matrices that are stacked in its parameter, at `index`.
    `hf_shapes` are the shapes of the whole tensors; each is divided along `divided`
    among the stage's tensor-parallel ranks, or is complete on each of them (None). A tensor of all experts is divided
    among the expert-parallel ranks in place of those, if it `has_experts`.
    """

    megatron_name: str
    hf_shapes: Mapping[str, tuple[int, ...]]
    fusion: Fusion
    stage: int = 0
    divided: int | None = None
    ep_rank: int | None = None
    index: int | None = None
    has_experts: bool = False

    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Its part of the parameters under their names, or of their gradients: a view."""
        tensor = tensors[self.megatron_name]
        return tensor if self.index is None else tensor[self.index]

    def is_on(self, parallel: Parallel) -> bool:
        return self.stage == parallel.pp_rank and self.ep_rank in (None, parallel.ep_rank)

    def share_of(self, parallel: Parallel) -> tuple[int, int]:
        """(A rank's number among those that divide it, how many these are)."""
        if self.has_experts:
            return parallel.ep_rank, parallel.ep_size
        return parallel.tp_rank, parallel.tp_size

    def on(self, tp_rank: int) -> "WeightEntry":
        """The entry whose `fusion` is that of one tensor-parallel rank's part."""
        return replace(self, fusion=replace(self.fusion, rank=tp_rank)) if isinstance(self.fusion, SlicedQKV) else self

    def shards(self, rank: int, num_ranks: int) -> list["Shard"]:
        """What one of the ranks that divide it has of each whole Hugging Face tensor, in `hf_shapes`' order."""
        fusion, shapes = self.on(rank).fusion, list(self.hf_shapes.values())
        if isinstance(fusion, SlicedQKV):
            rows = [[range(part.start, part.stop)] for part in fusion.parts]
        elif self.divided is None:
            return [Shard(0, (tuple(slice(0, size) for size in shape),)) for shape in shapes]
        else:
            blocks = fusion.blocks if isinstance(fusion, ByHead) else ((1,),) * len(shapes)
            rows = [
                _shares(block_sizes(shape[self.divided], sizes), rank, num_ranks)
                for shape, sizes in zip(shapes, blocks, strict=True)
            ]
        return [_shard(shape, self.divided or 0, parts) for shape, parts in zip(shapes, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a Hugging Face tensor: slices of the whole, one after the other along `dim`."""

    dim: int
    slices: tuple[tuple[slice, ...], ...]

    def of(self, read: Callable[[tuple[slice, ...]], torch.Tensor]) -> torch.Tensor:
        """The part; `read` gives a slice of the whole."""
        parts = [read(at) for at in self.slices]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Writes the part to its place in the whole."""
        sizes = [at[self.dim].stop - at[self.dim].start for at in self.slices]
        for at, piece in zip(self.slices, part.split(sizes, self.dim), strict=True):
            whole[at].copy_(piece)


def _shares(sizes: Sequence[int], rank: int, num_ranks: int) -> list[range]:
    """A rank's rows of blocks of these sizes, each of which is divided by itself."""
    starts = accumulate(sizes, initial=0)
    return [
        range(start + rank * (size // num_ranks), start + (rank + 1) * (size // num_ranks))
        for start, size in zip(starts, sizes, strict=False)
    ]


def _shard(shape: tuple[int, ...], dim: int, parts: Sequence[range]) -> Shard:
    whole = [slice(0, size) for size in shape]
    return Shard(dim, tuple((*whole[:dim], slice(rows.start, rows.stop), *whole[dim + 1 :]) for rows in parts))


def weight_map(shape: ModelShape, layout: Layout | None = None) -> Iterator[WeightEntry]:
    """All weights of a model, layer by layer, in publishing order, the same under any layout; no tied head."""
    layout = layout or Layout()
    V, H = shape.vocab_size, shape.hidden_size
    last, last_chunk = layout.pp_size - 1, layout.num_chunks - 1
    first = layout.name_in(0, "embedding.word_embeddings.weight")
    yield WeightEntry(first, {EMBEDDING: (V, H)}, Stacked(), divided=ROWS)
    for layer in range(shape.num_layers):
        yield from _layer_map(shape, layout, layer)
    norm = layout.name_in(last_chunk, "decoder.final_layernorm.weight")
    yield WeightEntry(norm, {"model.norm.weight": (H,)}, Stacked(), last)
    head = layout.name_in(last_chunk, "output_layer.weight")
    if shape.gives_values:
        yield WeightEntry(head, {VALUE_HEAD: (1, H)}, Stacked(), last)
    elif not shape.tied:
        yield WeightEntry(head, {"lm_head.weight": (V, H)}, Stacked(), last, ROWS)


def tied_head(shape: ModelShape, layout: Layout) -> WeightEntry | None:
    """The copy of a tied embedding that the last pipeline stage has; it is loaded, but published only once."""
    if not shape.tied or layout.pp_size == 1:
        return None
    shapes = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    head = layout.name_in(layout.num_chunks - 1, "output_layer.weight")
    return WeightEntry(head, shapes, Stacked(), layout.pp_size - 1, ROWS)


MakeEntry = Callable[..., WeightEntry]

NORMS = ("input_layernorm", "self_attn_bda.norm", "pre_mlp_layernorm", "mlp_bda.norm")
"""Of a layer, in the order of `ModelShape.norms`."""


def constants(shape: ModelShape, layout: Layout | None = None) -> Iterator[WeightEntry]:
    """What a checkpoint has that training does not change: it is loaded and saved, but not published.

    The bias that DeepSeek's experts are chosen by is float32 whatever the model's dtype.
    """
    if shape.experts is None or shape.experts.grouping is None:
        return
    for layer in range(shape.experts.num_dense, shape.num_layers):
        entry, names = _LayerNames(shape, layout or Layout(), layer).entry, TABLE[shape.family].expert_names
        choice_bias = f"{names.part}.{names.choice_bias}"
        yield entry("mlp.router.choice_bias", {choice_bias: (shape.experts.num_experts,)})


@cache
def _place_of_layer(num_layers: int, num_stages: int, layer: int) -> tuple[int, int]:
    """(Its stage, its number within that)."""
    stages = stage_layers(num_layers, num_stages)
    return next((stage, layer - layers.start) for stage, layers in enumerate(stages) if layer in layers)


class _LayerNames:
    """Creates the entries of one layer from names within it."""

    def __init__(self, shape: ModelShape, layout: Layout, layer: int) -> None:
        stage, local_layer = _place_of_layer(shape.num_layers, layout.pp_size * layout.num_chunks, layer)
        chunk, self._stage = divmod(stage, layout.pp_size)
        self._ours = layout.name_in(chunk, f"decoder.layers.{local_layer}.")
        self._theirs = f"model.layers.{layer}."

    def entry(
        self,
        name: str,
        hf_shapes: Mapping[str, tuple[int, ...]],
        fusion: Fusion | None = None,
        divided: int | None = None,
        ep_rank: int | None = None,
        index: int | None = None,
        *,
        has_experts: bool = False,
    ) -> WeightEntry:
        theirs = {self._theirs + hf_name: hf_shape for hf_name, hf_shape in hf_shapes.items()}
        return WeightEntry(
            self._ours + name, theirs, fusion or Stacked(), self._stage, divided, ep_rank, index, has_experts
        )


def _layer_map(shape: ModelShape, layout: Layout, layer: int) -> Iterator[WeightEntry]:
    H, entry = shape.hidden_size, _LayerNames(shape, layout, layer).entry
    norms = [
        entry(f"{ours}.weight", {f"{theirs}.weight": (H,)}) if theirs else None
        for ours, theirs in zip(NORMS, shape.norms, strict=True)
    ]
    yield from filter(None, norms[:1])
    if shape.has_delta(layer):
        yield from _delta_map(shape, entry)
    else:
        yield from _attention_map(shape, layout, entry) if shape.latents is None else _latents_map(shape, entry)
    yield from filter(None, norms[1:3])
    if shape.experts is not None and shape.experts.clamped_gate is not None:
        yield from _stacked_experts_map(shape, entry)
    elif shape.has_experts(layer):
        yield from _experts_map(shape, layout, entry)
    else:
        yield from _mlp_map(shape, entry)
    yield from filter(None, norms[3:])


def _attention_map(shape: ModelShape, layout: Layout, entry: MakeEntry) -> Iterator[WeightEntry]:
    H, D = shape.hidden_size, shape.head_dim
    out_size, kv_size = shape.num_heads * D, shape.num_kv_heads * D
    # Each query head is followed by its gate, where there are gates.
    q_size = 2 * out_size if shape.has(OUT_GATE) else out_size
    qkv: Fusion = ByHead.qkv(q_size // kv_size, D)
    if shape.num_kv_heads < layout.tp_size:
        qkv = SlicedQKV(q_size // kv_size, D, shape.num_kv_heads, 0, layout.tp_size)
    for kind in ("weight", "bias") if shape.has(QKV_BIAS) else ("weight",):
        rest = (H,) if kind == "weight" else ()
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        hf_shapes = {f"self_attn.{name}.{kind}": (size, *rest) for name, size in sizes.items()}
        yield entry(f"self_attention.linear_qkv.{kind}", hf_shapes, qkv, ROWS)
    for name, num_heads in zip("qk", shape.qk_norm_heads or (), strict=False):
        yield entry(f"self_attention.{name}_layernorm.weight", {f"self_attn.{name}_norm.weight": (num_heads * D,)})
    yield entry("self_attention.linear_proj.weight", {"self_attn.o_proj.weight": (H, out_size)}, divided=COLUMNS)
    if shape.has(OUT_BIAS):
        yield entry("self_attention.linear_proj.bias", {"self_attn.o_proj.bias": (H,)})
    if shape.has(SINKS):
        yield entry("self_attention.core_attention.sinks", {"self_attn.sinks": (shape.num_heads,)}, divided=ROWS)


def _latents_map(shape: ModelShape, entry: MakeEntry) -> Iterator[WeightEntry]:
    """What makes latents is on every rank; heads are divided."""
    assert shape.latents is not None
    H, A, sizes = shape.hidden_size, shape.num_heads, shape.latents
    q_up, q_size, kv_size = "q_proj", A * shape.head_dim, A * (sizes.nope_dim + sizes.value_dim)
    if sizes.q_rank is not None:
        q_up = "q_b_proj"
        yield entry("self_attention.linear_q_down.weight", {"self_attn.q_a_proj.weight": (sizes.q_rank, H)})
        yield entry("self_attention.q_layernorm.weight", {"self_attn.q_a_layernorm.weight": (sizes.q_rank,)})
    up = {f"self_attn.{q_up}.weight": (q_size, sizes.q_rank or H)}
    yield entry("self_attention.linear_q_up.weight", up, divided=ROWS)
    down = {"self_attn.kv_a_proj_with_mqa.weight": (sizes.kv_rank + sizes.rope_dim, H)}
    yield entry("self_attention.linear_kv_down.weight", down)
    yield entry("self_attention.kv_layernorm.weight", {"self_attn.kv_a_layernorm.weight": (sizes.kv_rank,)})
    up = {"self_attn.kv_b_proj.weight": (kv_size, sizes.kv_rank)}
    yield entry("self_attention.linear_kv_up.weight", up, divided=ROWS)
    out = {"self_attn.o_proj.weight": (H, A * sizes.value_dim)}
    yield entry("self_attention.linear_proj.weight", out, divided=COLUMNS)


def _delta_map(shape: ModelShape, entry: MakeEntry) -> Iterator[WeightEntry]:
    """Key heads are divided, with their value heads; the norm of a value head is on every rank."""
    delta = shape.delta
    assert delta is not None
    H, K, values = shape.hidden_size, delta.num_key_heads, delta.num_value_heads
    *mixed, gates, rates, decays = delta.projected
    if TABLE[shape.family].delta == "by_head":
        sizes = {"in_proj_qkvz": (*mixed, gates), "in_proj_ba": (rates, decays)}
        blocks: tuple[tuple[int, ...], ...] = tuple((sum(parts),) for parts in sizes.values())
    else:
        sizes = {"in_proj_qkv": (*mixed,), "in_proj_z": (gates,), "in_proj_b": (rates,), "in_proj_a": (decays,)}
        blocks = tuple(sizes.values())
    into = {f"linear_attn.{name}.weight": (K * sum(parts), H) for name, parts in sizes.items()}
    yield entry("self_attention.linear_in.weight", into, ByHead(blocks), ROWS)
    conv = {"linear_attn.conv1d.weight": (K * delta.mixed_size, 1, delta.conv_width)}
    yield entry("self_attention.conv_weight", conv, ByHead((delta.mixed,)), ROWS)
    yield entry("self_attention.decay_bias", {"linear_attn.dt_bias": (values,)}, divided=ROWS)
    yield entry("self_attention.decay_log", {"linear_attn.A_log": (values,)}, divided=ROWS)
    yield entry("self_attention.out_norm.weight", {"linear_attn.norm.weight": (delta.value_dim,)})
    out = {"linear_attn.out_proj.weight": (H, values * delta.value_dim)}
    yield entry("self_attention.linear_out.weight", out, divided=COLUMNS)


def _mlp_map(shape: ModelShape, entry: MakeEntry) -> Iterator[WeightEntry]:
    H, F = shape.hidden_size, shape.ffn_size
    for kind, rest in (("weight", (H,)), ("bias", ())) if shape.has(MLP_BIAS) else (("weight", (H,)),):
        gate_up = {f"mlp.{name}_proj.{kind}": (F, *rest) for name in ("gate", "up")}
        yield entry(f"mlp.linear_fc1.{kind}", gate_up, Stacked(2), ROWS)
    yield entry("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (H, F)}, divided=COLUMNS)
    if shape.has(MLP_BIAS):
        yield entry("mlp.linear_fc2.bias", {"mlp.down_proj.bias": (H,)})


def _experts_map(shape: ModelShape, layout: Layout, entry: MakeEntry) -> Iterator[WeightEntry]:
    """The router, which every rank has, the experts, undivided, in equal shares on the expert-parallel ranks, and what
    all rows pass beside them, divided as a dense layer's feed-forward part."""
    assert shape.experts is not None
    H, F, names = shape.hidden_size, shape.experts.ffn_size, TABLE[shape.family].expert_names
    yield entry("mlp.router.weight", {f"{names.part}.gate.weight": (shape.experts.num_experts, H)})
    for expert in range(shape.experts.num_experts):
        ep_rank, local_expert = divmod(expert, shape.experts.num_experts // layout.ep_size)
        theirs = f"{names.part}.experts.{expert}."
        gate_up = {f"{theirs}{name}.weight": (F, H) for name in (names.gate, names.up)}
        down = {f"{theirs}{names.down}.weight": (H, F)}
        yield entry("mlp.experts.weight1", gate_up, Stacked(2), ep_rank=ep_rank, index=local_expert)
        yield entry("mlp.experts.weight2", down, ep_rank=ep_rank, index=local_expert)
    if size := shape.experts.shared_size:
        theirs = "mlp.shared_expert" if shape.experts.gates_shared else "mlp.shared_experts"
        gate_up = {f"{theirs}.{name}_proj.weight": (size, H) for name in ("gate", "up")}
        yield entry("mlp.shared_experts.linear_fc1.weight", gate_up, Stacked(2), ROWS)
        down = {f"{theirs}.down_proj.weight": (H, size)}
        yield entry("mlp.shared_experts.linear_fc2.weight", down, divided=COLUMNS)
    if shape.experts.gates_shared:
        yield entry("mlp.shared_experts.gate_weight", {"mlp.shared_expert_gate.weight": (1, H)})


def _stacked_experts_map(shape: ModelShape, entry: MakeEntry) -> Iterator[WeightEntry]:
    """The same of gpt-oss, whose checkpoints have the experts of a layer in one tensor of each kind, transposed."""
    assert shape.experts is not None
    E, H, F = shape.experts.num_experts, shape.hidden_size, shape.experts.ffn_size
    yield entry("mlp.router.weight", {"mlp.router.weight": (E, H)})
    yield entry("mlp.router.bias", {"mlp.router.bias": (E,)})
    for ours, theirs, size, fusion in (
        ("weight1", "gate_up_proj", (E, H, 2 * F), Transposed(in_turn=2)),
        ("bias1", "gate_up_proj_bias", (E, 2 * F), Transposed(in_turn=2)),
        ("weight2", "down_proj", (E, F, H), Transposed()),
        ("bias2", "down_proj_bias", (E, H), Transposed()),
    ):
        name = f"mlp.experts.{theirs}"
        yield entry(f"mlp.experts.{ours}", {name: size}, fusion, ROWS, has_experts=True)
