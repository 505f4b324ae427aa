"""Rows for heads between context-parallel ranks, around the attention of a layer (DeepSpeed-Ulysses, arXiv 2309.14509).

Outside of attention a rank has some of the rows, in attention it has all rows and some of the heads: whole segments, so
that the kernels are the same. Per layer and forward pass a rank sends W - 1 of W parts of its queries, keys, values and
outputs, and in backward of their gradients: in all

    2 (W - 1) / W * T * (H * Dq + max(K, W) * (Dk + Dv) + H * Dv)    values

for forward and backward, where T are its rows, H and K the query and key / value heads that it has of its rows.

Shape legend: W context-parallel ranks, T rows of this rank, S = W * T rows of all, H query heads, K key / value heads,
D head dimension, F values of a row for one rank.
"""

from typing import Any

import torch
import torch.distributed as dist


def rows_to_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[T, H, D] each, of any numbers of heads and dimensions -> [S, H / W, D], in one exchange, with gradients.

    Where there are more ranks than heads, W is a multiple of their number, and the result has one head: neighbouring
    ranks get the same one, and their gradients are summed.
    """
    ways = group.size()
    parts = [tensor.repeat_interleave(max(1, ways // tensor.shape[1]), 1) for tensor in tensors]
    sent_WTF = torch.cat([part.unflatten(1, (ways, -1)).flatten(2) for part in parts], -1).transpose(0, 1)
    received_SF = _exchanged(sent_WTF, group).flatten(0, 1)
    heads = [part.shape[1] // ways for part in parts]
    sizes = [number * part.shape[2] for number, part in zip(heads, parts, strict=True)]
    return [
        own_SF.unflatten(1, (number, -1)) for own_SF, number in zip(received_SF.split(sizes, 1), heads, strict=True)
    ]


def heads_to_rows(tensor_SHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The reverse for one tensor: [S, H / W, D] -> [T, H, D], with gradients."""
    received_WTHD = _exchanged(tensor_SHD.unflatten(0, (group.size(), -1)), group)
    return received_WTHD.transpose(0, 1).flatten(1, 2)


def _exchanged(sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # `apply` is untyped in torch.
    received: torch.Tensor = _Exchange.apply(sent, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i, and part i of the result came from it; gradients go back."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _sent(sent, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _sent(grad, ctx.group), None


def _sent(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
