"""Rows for heads between context-parallel ranks, around the attention of a layer (DeepSpeed-Ulysses, arXiv 2309.14509).

Outside of attention a rank has some of the rows, in attention it has all rows and some of the heads: whole segments, so
that the kernels are the same. Per layer and forward pass a rank sends W - 1 of W parts of its queries, keys, values and
outputs, and in backward of their gradients: in all

    2 (W - 1) / W * T * (H * Dq + max(K, W) * (Dk + Dv) + H * Dv)    values

for forward and backward, where T are its rows, H and K the query and key / value heads that it has of its rows. What is
sent and what is received are one tensor each, and the first is dropped at once.

Shape legend: W context-parallel ranks, T rows of this rank, S = W * T rows of all, H heads of one of the tensors, h of
them in attention, C ranks that get the same head, D head dimension, F values of a row for one rank.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


def rows_to_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """[T, H, D] each, of any numbers of heads and dimensions -> [S, h, D], in one exchange, with gradients.

    h is H / W. Where there are more ranks than heads, W is a multiple of their number, and h is 1: neighbouring ranks
    get the same head, and their gradients are summed.
    """
    # `apply` is untyped in torch.
    received: tuple[torch.Tensor, ...] = _RowsToHeads.apply(group, *tensors)  # type: ignore[no-untyped-call]
    return received


def heads_to_rows(tensor_ShD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The reverse for one tensor that all ranks have different heads of: [S, h, D] -> [T, H, D], with gradients."""
    rows_THD: torch.Tensor = _HeadsToRows.apply(group, tensor_ShD)  # type: ignore[no-untyped-call]
    return rows_THD


class _RowsToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.shapes = group, [tensor.shape for tensor in tensors]
        return _heads_of_rows(tensors, group)

    @staticmethod
    def backward(ctx: Any, *grads_ShD: torch.Tensor) -> Any:
        return None, *_rows_of_heads(grads_ShD, ctx.shapes, ctx.group)


class _HeadsToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor_ShD: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        num_rows, num_heads, size = tensor_ShD.shape
        shape = torch.Size((num_rows // group.size(), num_heads * group.size(), size))
        return _rows_of_heads([tensor_ShD], [shape], group)[0]

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> Any:
        return None, *_heads_of_rows([grad_THD], ctx.group)


def _heads_of_rows(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    shapes = [tensor.shape for tensor in tensors]
    sent_WTF = _empty(tensors[0], shapes, group.size())
    for tensor_THD, part in zip(tensors, _parts(sent_WTF, shapes), strict=True):
        num_ranks_alike, num_heads = part.shape[1], part.shape[3]
        # To the ranks that get the same heads, one after the other.
        heads = tensor_THD.unflatten(1, (-1, num_heads)).transpose(0, 1)
        part.copy_(heads[:, None].expand(-1, num_ranks_alike, -1, -1, -1))
    received_WTF = torch.empty_like(sent_WTF)
    dist.all_to_all_single(received_WTF, sent_WTF, group=group)
    return tuple(part.flatten(0, 2) for part in _parts(received_WTF, shapes))


def _rows_of_heads(
    tensors_ShD: Sequence[torch.Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Also the transpose of `_heads_of_rows`: what several ranks have of the same head is summed."""
    sent_WTF = _empty(tensors_ShD[0], shapes, group.size())
    for tensor_ShD, part in zip(tensors_ShD, _parts(sent_WTF, shapes), strict=True):
        part.copy_(tensor_ShD.unflatten(0, part.shape[:3]))
    received_WTF = torch.empty_like(sent_WTF)
    dist.all_to_all_single(received_WTF, sent_WTF, group=group)
    del sent_WTF
    # A sum copies, even of one.
    by_head = (part.sum(1) if part.shape[1] > 1 else part[:, 0] for part in _parts(received_WTF, shapes))
    return [heads.transpose(0, 1).flatten(1, 2) for heads in by_head]


def _empty(like: torch.Tensor, shapes: Sequence[torch.Size], ways: int) -> torch.Tensor:
    size = sum(max(1, shape[1] // ways) * shape[2] for shape in shapes)
    return like.new_empty(ways, shapes[0][0], size)


def _parts(exchanged_WTF: torch.Tensor, shapes: Sequence[torch.Size]) -> Iterator[torch.Tensor]:
    """Each tensor's part of the values, as views: [W / C, C, T, h, D]."""
    ways = len(exchanged_WTF)
    heads = [max(1, shape[1] // ways) for shape in shapes]
    sizes = [number * shape[2] for number, shape in zip(heads, shapes, strict=True)]
    for part_WTF, number, shape in zip(exchanged_WTF.split(sizes, 2), heads, shapes, strict=True):
        alike = max(1, ways // shape[1])
        yield part_WTF.unflatten(2, (number, -1)).unflatten(0, (-1, alike))
