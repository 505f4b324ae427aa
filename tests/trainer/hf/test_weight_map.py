"""Names, places and parts of all weights under any layout: nothing missing, nothing twice, parts make the whole."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.shared.model_parts import ClampedGate, DeltaNet, Experts
from async_rl.shared.model_shape import ModelShape
from async_rl.shared.weights import fingerprint
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.messages import bucket_bytes_of, messages
from trainer.hf.fusions import ByHead, Stacked, Transposed
from trainer.hf.weight_map import COLUMNS, EMBEDDING, ROWS, Layout, tied_head, weight_map

SIZES = st.integers(1, 4)


def shape(family: str, tied: bool = False, *, experts: Experts | None = None) -> ModelShape:
    """Every size that a layout divides is a multiple of 12."""
    return ModelShape(family, 12, 24, 36, 24, 12, 4, 48, 1e-6, 1e4, None, tied, experts)


DELTA = DeltaNet(12, 24, 3, 5, 4, frozenset(range(0, 12, 2)))
SHAPES = [
    *(shape(family, tied) for family, tied in product(("qwen2", "qwen3", "llama"), (True, False))),
    *(shape("qwen3_moe", tied, experts=Experts(12, 2, 12, True)) for tied in (True, False)),
    replace(shape("qwen3_next", experts=Experts(12, 2, 12, True, None, 12, 0, gates_shared=True)), delta=DELTA),
    replace(shape("qwen3_5_text", tied=True), delta=DELTA),
    shape("gpt_oss", experts=Experts(12, 2, 12, True, clamped_gate=ClampedGate(1.7, 7.0))),
]
LAYOUTS = [Layout(tp, pp, ep) for tp, pp, ep in product((1, 2, 3, 4), repeat=3)]
LAYOUTS += [Layout(1, pp, ep, chunks) for pp, ep, chunks in ((2, 1, 2), (2, 3, 6), (3, 2, 4), (4, 1, 2), (5, 1, 2))]


def numbered(*sizes: int) -> torch.Tensor:
    """A tensor in which every element is another."""
    return torch.arange(torch.Size(sizes).numel()).view(sizes)


@settings(max_examples=60)
@given(SIZES, SIZES, SIZES, st.sampled_from([(), (3,)]))
def test_queries_keys_and_values_stand_head_by_head(
    num_kv: int, queries_per_kv: int, head_dim: int, rest: tuple[int, ...]
) -> None:
    """Weights, and biases, which have no second dimension."""
    counts = (num_kv * queries_per_kv, num_kv, num_kv)
    q, k, v = (numbered(count * head_dim, *rest) + 1000 * i for i, count in enumerate(counts))
    expected = []
    for head in range(num_kv):
        first = head * queries_per_kv
        expected += [q[i * head_dim : (i + 1) * head_dim] for i in range(first, first + queries_per_kv)]
        expected += [part[head * head_dim : (head + 1) * head_dim] for part in (k, v)]
    fusion = ByHead.qkv(queries_per_kv, head_dim)
    assert torch.equal(fusion.merge([q, k, v]), torch.cat(expected))
    for found, part in zip(fusion.split(torch.cat(expected)), (q, k, v), strict=True):
        assert torch.equal(found, part)


@settings(max_examples=30)
@given(SIZES, SIZES)
def test_stacked_parts_stand_one_after_the_other(num_parts: int, size: int) -> None:
    parts = [numbered(size, 3) + 100 * i for i in range(num_parts)]
    merged = Stacked(num_parts).merge(parts)
    assert torch.equal(merged, torch.stack(parts).flatten(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(Stacked(num_parts).split(merged), parts, strict=True))


@settings(max_examples=30)
@given(SIZES, SIZES, SIZES, SIZES)
def test_tensors_of_all_experts_are_turned_and_outputs_of_a_kind_brought_together(
    num_experts: int, inputs: int, size: int, in_turn: int
) -> None:
    """Weights, and biases, which have no inputs."""
    stored = numbered(num_experts, inputs, size * in_turn)
    fusion = Transposed(in_turn)
    merged = fusion.merge([stored])
    for expert, kind, output, of in product(range(num_experts), range(in_turn), range(size), range(inputs)):
        assert merged[expert, kind * size + output, of] == stored[expert, of, output * in_turn + kind]
    assert torch.equal(fusion.merge([stored[:, 0]]), merged[..., 0])
    for whole, part in ((merged, stored), (merged[..., 0], stored[:, 0])):
        (found,) = fusion.split(whole)
        assert torch.equal(found, part) and found.is_contiguous()


@pytest.mark.parametrize("model", SHAPES, ids=lambda model: f"{model.family}{' tied' * model.tied}")
def test_every_layout_has_the_weights_of_the_whole_model_once_and_in_its_order(model: ModelShape) -> None:
    whole = [(name, size) for entry in weight_map(model) for name, size in entry.hf_shapes.items()]
    assert len(dict(whole)) == len(whole)
    assert ("lm_head.weight" in dict(whole)) is not model.tied
    for layout in LAYOUTS:
        entries = list(weight_map(model, layout))
        assert [(name, size) for entry in entries for name, size in entry.hf_shapes.items()] == whole
        places = [(entry.stage, entry.ep_rank, entry.megatron_name, entry.index) for entry in entries]
        assert len(set(places)) == len(places), "no rank has two weights of one name"
        assert {entry.stage for entry in entries} == set(range(layout.pp_size))
        ep_ranks = {entry.ep_rank for entry in entries} - {None}
        is_named = model.experts is not None and model.experts.clamped_gate is None
        assert ep_ranks == (set(range(layout.ep_size)) if is_named else set())
        assert any(entry.has_experts for entry in entries) == (model.experts is not None and not is_named)


def test_every_stage_and_every_rank_of_experts_calls_its_weights_alike() -> None:
    """Megatron numbers layers and experts anew on each of them."""
    model, layout = SHAPES[7], Layout(pp_size=3, ep_size=2)
    names: dict[tuple[int, int | None], set[tuple[str, int | None]]] = {}
    for entry in weight_map(model, layout):
        if entry.megatron_name.startswith("decoder.layers."):
            names.setdefault((entry.stage, entry.ep_rank), set()).add((entry.megatron_name, entry.index))
    for ep_rank in (None, 0, 1):
        assert names[0, ep_rank] == names[1, ep_rank] == names[2, ep_rank]
    assert names[0, 0] == names[0, 1] and ("decoder.layers.3.mlp.experts.weight1", 5) in names[0, 0]


def test_chunks_of_a_pipeline_have_every_second_part_of_the_layers() -> None:
    """Two stages of twelve layers with three chunks each: chunk by chunk the stages follow each other."""
    entries = weight_map(SHAPES[0], Layout(pp_size=2, num_chunks=3))
    norms = [entry for entry in entries if "input_layernorm.weight" in next(iter(entry.hf_shapes))]
    places = {(entry.stage, entry.megatron_name): list(entry.hf_shapes) for entry in norms}
    for layer in range(12):
        chunk, rest = divmod(layer, 4)
        stage, local = divmod(rest, 2)
        name = f"chunks.{chunk}.decoder.layers.{local}.input_layernorm.weight"
        assert places[stage, name] == [f"model.layers.{layer}.input_layernorm.weight"]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("model", SHAPES, ids=lambda model: f"{model.family}{' tied' * model.tied}")
def test_the_parts_of_tensor_parallel_ranks_make_the_whole_megatron_tensor(model: ModelShape, tp_size: int) -> None:
    for entry in weight_map(model, Layout(tp_size)):
        whole = [numbered(*size) + 10**6 * i for i, size in enumerate(entry.hf_shapes.values())]
        shards = [entry.shards(rank, tp_size) for rank in range(tp_size)]
        parts = [[shard.of(part.__getitem__) for part, shard in zip(whole, of_rank, strict=True)] for of_rank in shards]
        again = [torch.empty_like(tensor) for tensor in whole]
        for of_rank, own in zip(shards, parts, strict=True):
            for tensor, shard, part in zip(again, of_rank, own, strict=True):
                shard.put(part, tensor)
        assert all(map(torch.equal, again, whole))
        if entry.divided is None:
            assert all(torch.equal(a, b) for rank in parts for a, b in zip(rank, whole, strict=True))
            continue
        if not isinstance(entry.fusion, Stacked) or entry.fusion.num_parts == 1:
            # Gate and up are stacked on each rank, so there the whole is not the ranks' parts in a row.
            merged = torch.cat([entry.fusion.merge(rank) for rank in parts], entry.divided)
            assert torch.equal(merged, entry.fusion.merge(whole))


@pytest.mark.parametrize(("num_kv", "num_heads", "tp_size"), [(1, 2, 2), (1, 6, 3), (2, 4, 4), (2, 8, 8), (3, 12, 6)])
def test_ranks_that_share_a_key_head_have_equal_shares_of_the_rows_of_one_rank(
    num_kv: int, num_heads: int, tp_size: int
) -> None:
    model = replace(shape("qwen2"), num_heads=num_heads, num_kv_heads=num_kv, head_dim=6)
    names = [f"decoder.layers.0.self_attention.linear_qkv.{kind}" for kind in ("weight", "bias")]
    alone, shared = ({entry.megatron_name: entry for entry in weight_map(model, Layout(size))} for size in (1, tp_size))
    for name in names:
        whole = [numbered(*size) + 10**6 * i for i, size in enumerate(shared[name].hf_shapes.values())]
        expected = alone[name].fusion.merge(whole).chunk(tp_size)
        again = [torch.empty_like(tensor) for tensor in whole]
        for rank in range(tp_size):
            entry, shards = shared[name].on(rank), shared[name].shards(rank, tp_size)
            own = [shard.of(tensor.__getitem__) for tensor, shard in zip(whole, shards, strict=True)]
            merged = entry.fusion.merge(own)
            assert torch.equal(merged, expected[rank])
            for tensor, shard, part in zip(again, shards, entry.fusion.split(merged), strict=True):
                shard.put(part, tensor)
        assert all(map(torch.equal, again, whole))


def test_what_multiplies_from_the_left_is_divided_by_columns() -> None:
    divided = {entry.megatron_name.split(".", 3)[-1]: entry.divided for entry in weight_map(shape("qwen2"))}
    assert divided["mlp.linear_fc2.weight"] == divided["self_attention.linear_proj.weight"] == COLUMNS
    assert divided["mlp.linear_fc1.weight"] == divided["self_attention.linear_qkv.bias"] == ROWS
    assert divided["input_layernorm.weight"] is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_tied_head_is_a_copy_on_the_last_stage_of_several(layout: Layout) -> None:
    entry = tied_head(shape("qwen3", tied=True), layout)
    assert (entry is not None) == (layout.pp_size > 1)
    if entry is not None:
        assert entry.hf_shapes == {EMBEDDING: (48, 24)} and entry.stage == layout.pp_size - 1
    assert tied_head(shape("qwen3", tied=False), layout) is None


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, expert_ffn: int = 0) -> ModelShape:
    experts = Experts(num_experts=128, top_k=8, ffn_size=expert_ffn, renormalized=True) if expert_ffn else None
    family = "qwen3_moe" if experts else "qwen3"
    return ModelShape(
        family, layers, hidden, ffn, heads, kv_heads, 128, 151_936, 1e-6, 1e6, None, tied=False, experts=experts
    )


@pytest.mark.parametrize(
    ("shape", "num_tensors", "gigabytes", "num_messages", "host_bytes"),
    [
        (_qwen3(36, 4096, 12288, 32, 8), 399, 16.4, 50, 2_928),
        (_qwen3(64, 5120, 25600, 64, 8), 707, 65.5, 258, 8_240),
        (_qwen3(48, 2048, 6144, 32, 4, 768), 18_867, 61.1, 182, 13_872),
        (_qwen3(94, 4096, 12288, 64, 4, 1536), 36_945, 470.2, 1_431, 102_320),
    ],
    ids=["Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B"],
)
def test_a_publish_between_devices_is_few_messages_and_bytes_of_its_fingerprint_on_the_host(
    shape: ModelShape,
    num_tensors: int,
    gigabytes: float,
    num_messages: int,
    host_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The models as their config.json have them, in bfloat16; tensors without memory."""
    shapes = {name: shape for entry in weight_map(shape) for name, shape in entry.hf_shapes.items()}
    specs = [TensorSpec(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()]
    of_device = list(messages(specs, lambda spec: spec, bucket_bytes_of("nccl"), torch.device("cuda")))
    assert [spec for each in of_device for spec in each] == specs
    sums: list[torch.Tensor] = []

    def word_sums(words_N: torch.Tensor) -> torch.Tensor:
        sums.append(torch.zeros(2, dtype=torch.int64))
        return sums[-1]

    monkeypatch.setattr(fingerprint, "_word_sums", word_sums)
    whole = fingerprint.DeviceFingerprint()
    for spec in specs:
        whole.add(spec, torch.empty(spec.num_bytes, dtype=torch.uint8, device="meta"))
    assert whole.hexdigest()
    total = sum(spec.num_bytes for spec in specs)
    assert (len(specs), round(total / 1e9, 1)) == (num_tensors, gigabytes)
    assert (len(of_device), sum(each.nbytes for each in sums)) == (num_messages, host_bytes)
