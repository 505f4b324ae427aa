"""The tensors of a checkpoint: which part of each this rank has, under names that do not depend on the layout.

Megatron's `sharded_state_dict` gives the position of a rank's parameters in the whole model. Its own optimizer state
dicts are not used: they differ between its optimizers, so that a run could not resume with another one. Here every
optimizer has the same three tensors per parameter; a rank's part of them consists of boxes of the whole tensor:

    policy.NAME       float32 master weight     exp_avg.NAME, exp_avg_sq.NAME    float32 Adam moments
    old.NAME          weight of the old policy's model, if there is one, in the model's dtype
    critic.NAME, critic_exp_avg.NAME, critic_exp_avg_sq.NAME    the same three of a critic

Where adapters are trained these are the adapters' factors and a critic's head; the base is not saved.

A bfloat16 model's weights are its master weights, rounded.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer

from async_rl.shared.weights.swap import on_host
from trainer.model.adapters import adapters_of
from trainer.model.gpt import RankModel
from trainer.policy.optimizer_state import ParameterState

POLICY = "policy"
OLD = "old"
CRITIC = "critic"

_NAMES = {
    # Every layer under its own number, and gate and up separately: each tensor is then one block per rank.
    "singleton_local_shards": True,
    "non_homogeneous_layers": True,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of the checkpoint as a part of one parameter: its elements from `start` on, flattened."""

    start: int
    sharded: ShardedTensor


def model_tensors(model: RankModel, prefix: str) -> list[ShardedTensor]:
    """This rank's part of a model's weights, as views of its parameters."""
    return [
        replace(piece.sharded, key=f"{prefix}.{piece.sharded.key}")
        for pieces in _pieces(model).values()
        for piece in pieces
    ]


def optimizer_tensors(model: RankModel, states: Iterable[ParameterState], whose: str = POLICY) -> list[ShardedTensor]:
    """This rank's part of the master weights and moments of `model`, as views of the optimizer's tensors."""
    pieces, of_moments = _pieces(model), "" if whose == POLICY else f"{whose}_"
    return [
        tensor
        for state in states
        for piece in pieces[id(state.parameter)]
        for prefix, flat in {whose: state.master, **{of_moments + k: m for k, m in state.moments.items()}}.items()
        for tensor in _cut(piece, prefix, flat, state)
    ]


def snapshot(tensors: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Copies in host memory of the tensors that this rank writes; each element of the model once."""
    return [
        replace(tensor, data=on_host(tensor.data.detach()).to("cpu", copy=True))
        for tensor in tensors
        if is_main_replica(tensor.replica_id)
    ]


def storable(tensors: Iterable[ShardedTensor]) -> dict[str, torch.Tensor]:
    """The state dict that torch.distributed.checkpoint writes or fills: this rank's parts of each tensor as one."""
    parts: dict[str, list[CheckpointableShardedTensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.key, []).append(CheckpointableShardedTensor.from_sh_ten(tensor))
    return {key: LocalShardsContainer(shards) for key, shards in parts.items()}


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements `start` to `stop` of a row-major array as boxes (offset, size), in the order of the elements.

    At each level these are the end of a row, whole rows, and the beginning of a row; empty boxes are left out.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:
        yield from _within_row(shape, end_whole, start, stop)
        return
    yield from _within_row(shape, first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        yield (first_whole, *(0 for _ in shape[1:])), (end_whole - first_whole, *shape[1:])
    yield from _within_row(shape, end_whole, end_whole * row, stop)


def _within_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    begin = index * math.prod(shape[1:])
    for offset, size in boxes(shape[1:], start - begin, stop - begin):
        yield (index, *offset), (1, *size)


def _pieces(model: RankModel) -> dict[int, list[_Piece]]:
    """id(parameter) -> the checkpoint's tensors of which it holds a part; of those that are trained."""
    found = dict(_adapter_pieces(model))
    kept = [p for p in model.parameters() if p.requires_grad or not found]
    parameters = {id(parameter) for parameter in kept} - found.keys()
    for entry in model.sharded_state_dict(metadata=dict(_NAMES)).values():
        if isinstance(entry, ShardedObject):  # Megatron's slot for fp8 scales, empty here.
            continue
        parameter = entry.data
        if id(parameter) not in parameters:  # Constants of the model that was loaded.
            continue
        built = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
        pieces = [_piece(parameter, sharded) for sharded in built]
        assert sum(piece.sharded.data.numel() for piece in pieces) == parameter.numel(), f"{entry.key} has gaps"
        found[id(parameter)] = pieces
    wanted = set(map(id, kept))
    missing = [name for name, p in model.named_parameters() if id(p) in wanted and id(p) not in found]
    assert not missing, f"not part of the model's sharded state dict: {missing}"
    return found


def _adapter_pieces(model: RankModel) -> Iterator[tuple[int, list[_Piece]]]:
    parallel = model.parallel
    for adapter in adapters_of(model).values():
        for factor in adapter.parameters():
            key, whole, offset = adapter.whole[id(factor)]
            # Ranks that have the same part: those of other replicas, and of other positions if it is not divided.
            tp_rank = 0 if factor.shape != whole else parallel.tp_rank
            replica_id = (0, tp_rank, parallel.dp_rank * parallel.cp_size + parallel.cp_rank)
            data, shape = factor.detach(), tuple(factor.shape)
            sharded = ShardedTensor(key, data, data.dtype, shape, whole, offset, None, replica_id)
            yield id(factor), [_Piece(0, sharded)]


def _piece(parameter: torch.Tensor, sharded: ShardedTensor) -> _Piece:
    data = sharded.data.detach()
    is_view = data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() and data.is_contiguous()
    assert is_view and not sharded.prepend_axis_num, f"{sharded.key} is not a block of its parameter"
    return _Piece(
        data.storage_offset() - parameter.storage_offset(),
        # Vocabularies are not padded, so shapes must match exactly.
        replace(sharded, data=data, axis_fragmentations=None, allow_shape_mismatch=False),
    )


def _cut(piece: _Piece, prefix: str, flat: torch.Tensor, state: ParameterState) -> Iterator[ShardedTensor]:
    """The part of `piece` that `flat` covers, as views of it."""
    whole = piece.sharded
    start = max(piece.start, state.start)
    stop = min(piece.start + whole.data.numel(), state.start + flat.numel())
    # Megatron's replica id is (pipeline, tensor, data parallel): each replica has different elements of a shard.
    replica_id = (*whole.replica_id[:2], 0) if state.is_shard else whole.replica_id
    at = start - state.start
    for offset, size in boxes(whole.local_shape, start - piece.start, stop - piece.start):
        numel = math.prod(size)
        yield replace(
            whole,
            key=f"{prefix}.{whole.key}",
            data=flat[at : at + numel].view(size),
            dtype=flat.dtype,
            local_shape=size,
            global_offset=tuple(a + b for a, b in zip(whole.global_offset, offset, strict=True)),
            replica_id=replica_id,
        )
        at += numel
