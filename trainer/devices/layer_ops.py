"""Small operations of a decoder layer for which some devices have fused kernels; without Megatron.

A device provides its own in `LAYER_OPS`; the functions here are the default, and the reference of the tests.
`trainer/model/layer_spec.py` puts them into Megatron's layers.

Shape legend: T fed rows, H heads, D head dimension, F feed-forward size of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.devices.grouped import grouped_linear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype (arXiv 1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """x cos + rotate_half(x) sin, where rotate_half maps the halves (a, b) of D to (-b, a) (arXiv 2104.09864)."""
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D


@dataclass(frozen=True, slots=True)
class LayerOps:
    """`swiglu` takes [..., 2F] and returns silu(first half) * second half; None leaves it to Megatron's MLP.

    `matmul` is for products outside of autograd, of which the log-probs consist. `grouped_linear` is the product of each
    expert's rows with its weight (see `grouped.py`).
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotary
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    swiglu: Callable[[torch.Tensor], torch.Tensor] | None = None
    grouped_linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = grouped_linear
