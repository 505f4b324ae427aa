"""RMSNorm, SwiGLU and rotary embedding by torch_npu's fused operators, which have their own backward.

Sources: torch_npu-npu_rms_norm.md, torch_npu-npu_swiglu.md and torch_npu-npu_rotary_mul.md in the documentation of
Ascend/op-plugin.

Shape legend: T fed rows, H heads, D head dimension, F feed-forward size of this rank.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

ROTARY_MODE = "half"
"""Rotates the first half of D against the second, as Hugging Face's models do."""


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
        """silu(first half) * second half: [..., 2F] -> [..., F]."""
        y: torch.Tensor = self._ops.npu_swiglu(x.contiguous(), dim=-1)
        return y

    def rotary(self, x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """x cos + rotate_half(x) sin, in x's dtype."""
        y_THD: torch.Tensor = self._ops.npu_rotary_mul(x_THD, cos_T1D, sin_T1D, rotary_mode=ROTARY_MODE)
        return y_THD
