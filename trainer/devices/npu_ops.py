"""RMSNorm, SwiGLU, rotary embedding and the products of experts by torch_npu's operators.

Sources: torch_npu-npu_rms_norm.md, torch_npu-npu_swiglu.md, torch_npu-npu_rotary_mul.md and
torch_npu-npu_grouped_matmul.md in the documentation of Ascend/op-plugin; docs/ops/gmm.md of Ascend/MindSpeed.

Shape legend: T fed rows, H heads, D head dimension, F feed-forward size of this rank; N rows sorted by expert, E
experts, K, M sizes of an expert's weight.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

ROTARY_MODE = "half"
"""Rotates the first half of D against the second, as Hugging Face's models do."""


GROUPS_OF_ROWS, GROUPS_OF_SUMMANDS = 0, 2
"""`group_type`: [N, K] times [E, K, M] is [N, M]; [M, N] times [N, K] is [E, M, K]."""

ONE_RESULT = 3
"""`split_item`: all groups in one tensor."""


@dataclass(frozen=True)
class NPUOps:
    """The operators of `torch_npu`, which is imported on first use if None."""

    torch_npu: ModuleType | None = None

    @property
    def _ops(self) -> ModuleType:
        return self.torch_npu or import_module("torch_npu")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
        # Positional: the documentation and the library name the first argument differently.
        y: torch.Tensor = self._ops.npu_rms_norm(x, weight, eps)[0]
        return y

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half: [..., 2F] -> [..., F]; no rows, as experts may get them, give none."""
        if x.numel() == 0:
            # The operator refuses it. Not a new tensor: the collectives of the backward pass hang on the graph.
            return x[..., : x.shape[-1] // 2]
        y: torch.Tensor = self._ops.npu_swiglu(x.contiguous(), dim=-1)
        return y

    def grouped_linear(self, x_NK: torch.Tensor, weight_EMK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Rows `ends_E[e - 1]` to `ends_E[e]`, int32, times the transpose of weight e: [N, M]; the last end is N."""
        # `apply` is untyped in torch.
        out_NM: torch.Tensor = _GroupedLinear.apply(x_NK, weight_EMK, ends_E.long(), self._ops)  # type: ignore[no-untyped-call]
        return out_NM

    def rotary(self, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """x cos + rotate_half(x) sin, in x's dtype."""
        y_THD: torch.Tensor = self._ops.npu_rotary_mul(x_THD, cos_T1D, sin_T1D, rotary_mode=ROTARY_MODE)
        return y_THD


class _GroupedLinear(torch.autograd.Function):
    """`npu_grouped_matmul`, which has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x_NK: torch.Tensor, weight_EMK: torch.Tensor, ends_E: torch.Tensor, ops: Any) -> torch.Tensor:
        ctx.save_for_backward(x_NK, weight_EMK, ends_E)
        ctx.ops = ops
        return _grouped(ops, x_NK, weight_EMK.transpose(1, 2), ends_E, GROUPS_OF_ROWS)

    @staticmethod
    def backward(ctx: Any, dout_NM: torch.Tensor) -> Any:
        x_NK, weight_EMK, ends_E = ctx.saved_tensors
        dout_NM = dout_NM.contiguous()
        dx_NK = _grouped(ctx.ops, dout_NM, weight_EMK, ends_E, GROUPS_OF_ROWS)
        # A transposed view: the operator reads the transposition from its strides.
        dweight_EMK = _grouped(ctx.ops, dout_NM.T, x_NK, ends_E, GROUPS_OF_SUMMANDS)
        return dx_NK, dweight_EMK, None, None


def _grouped(ops: Any, x: torch.Tensor, weight: torch.Tensor, ends_E: torch.Tensor, group_type: int) -> torch.Tensor:
    (made,) = ops.npu_grouped_matmul(
        [x], [weight], bias=None, group_list=ends_E, split_item=ONE_RESULT, group_type=group_type, group_list_type=0
    )
    result: torch.Tensor = made
    return result
