"""Operations of a decoder layer on a CPU, each with its own backward: fewer passes over memory than autograd's.

Shape legend: T fed rows, H heads, D head dimension, N size of a norm; M rows, I inputs and O outputs of a linear layer.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from async_rl.shared.cpu import exact, products

Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `layer_ops.rms_norm`; narrow dtypes are computed in float32, and rounded once."""
    # `apply` is untyped in torch.
    normed: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """As `layer_ops.rotary`; the angles of the two halves of D must be equal, and get no gradient."""
    rotated: torch.Tensor = _Rotary.apply(x_THD, cos_T1D, sin_T1D)  # type: ignore[no-untyped-call]
    return rotated


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> torch.Tensor:
    """Megatron's `linear_with_grad_accumulation_and_async_allreduce` without sequence parallelism, [..., O].

    The other arguments are for fused kernels of CUDA.
    """
    group = tp_group if allreduce_dgrad else None
    out: torch.Tensor = _Linear.apply(products.linear, input, weight, bias, group)  # type: ignore[no-untyped-call]
    return out


def exact_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any) -> torch.Tensor:
    """As `linear`, on one rank, with the forward pass of `async_rl.shared.cpu.exact`."""
    out: torch.Tensor = _Linear.apply(exact.linear, input, weight, bias, None)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """With r = (mean(x^2) + eps)^(-1/2), n = x r and y = n w: dx = r (dy w - n mean(dy w n)), dw = sum of dy n."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _widened(x)
        scale: torch.Tensor = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, weight_N, scale)
        normed = wide * scale
        return normed.mul_(weight_N).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        x, weight_N, scale = ctx.saved_tensors
        dout, wide_weight_N = _widened(dout), _widened(weight_N)
        normed = x * scale
        dweights = dout * normed
        means = (dweights @ wide_weight_N).div_(x.shape[-1]).unsqueeze(-1)
        dx = normed.mul_(means.neg_()).addcmul_(dout, wide_weight_N).mul_(scale)
        dweight_N = dweights.flatten(0, -2).sum(0).to(weight_N.dtype) if ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), dweight_N, None


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Rotary(torch.autograd.Function):
    """A rotation; its transpose is the rotation by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rotated(x_THD, cos_T1D, sin_T1D, 1)

    @staticmethod
    def backward(ctx: Any, dout_THD: torch.Tensor) -> Any:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rotated(dout_THD, cos_T1D, sin_T1D, -1), None, None


def _rotated(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, sign: int) -> torch.Tensor:
    out_THD = x_THD * cos_T1D
    (first, second), (to_first, to_second) = x_THD.chunk(2, dim=-1), out_THD.chunk(2, dim=-1)
    sin = sin_T1D.chunk(2, dim=-1)[0]
    to_first.addcmul_(second, sin, value=-sign)
    to_second.addcmul_(first, sin, value=sign)
    return out_THD


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose dx is summed over the ranks that have a part of W's rows, if there are several."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Product,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight_OI)
        ctx.group = group
        return product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        x, weight_OI = ctx.saved_tensors
        dx = products.matmul(dout, weight_OI)
        if ctx.group is not None:
            dist.all_reduce(dx, group=ctx.group)
        dout_MO = dout.flatten(0, -2)
        dbias_O = dout_MO.sum(0) if ctx.needs_input_grad[3] else None
        # A frozen weight needs none.
        dweight_OI = products.matmul(dout_MO.T, x.flatten(0, -2)) if ctx.needs_input_grad[2] else None
        return None, dx, dweight_OI, dbias_O, None
