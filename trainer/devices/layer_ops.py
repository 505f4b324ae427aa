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


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the outputs [M, H, D] and log-sum-exps [M, H] over each.

    In the wider dtype of the log-sum-exps: a difference of two half-precision numbers loses the bits that their sum
    keeps.
    """
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return torch.lerp(out.to(weight.dtype), other.to(weight.dtype), weight), torch.logaddexp(lse, other_lse)


Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def log_normalizer(logits_RV: torch.Tensor) -> torch.Tensor:
    """log sum exp of each row, [R, 1]."""
    return logits_RV.logsumexp(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class LayerOps:
    """`swiglu` takes [..., 2F] and returns silu(first half) * second half; None leaves it to Megatron's MLP.

    `linear` is what the linear layers of Megatron call, by its names of the arguments; None leaves it to Megatron.
    `matmul`, for products outside of autograd, and `log_normalizer`, log sum exp of logits [R, V] -> [R, 1], are what
    the log-probs consist of. `grouped_linear` is the product of each expert's rows with its weight (see `grouped.py`).
    `exact`: these are operations of `async_rl.shared.cpu.exact`, and so has everything else to be.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    rotary: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = rotary
    linear: Callable[..., torch.Tensor] | None = None
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul
    log_normalizer: Callable[[torch.Tensor], torch.Tensor] = log_normalizer
    swiglu: Callable[[torch.Tensor], torch.Tensor] | None = None
    grouped_linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = grouped_linear
    merge: Merge = merge
    exact: bool = False


DEFAULT_OPS = LayerOps()
