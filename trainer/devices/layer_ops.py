"""Small operations of a decoder layer for which some devices have fused kernels; without Megatron.

A device provides its own in `LAYER_OPS`; the functions here are the default, and the reference of the tests.
`trainer/model/layer_spec.py` puts them into Megatron's layers.

Shape legend: T fed rows, H heads, D head dimension, F feed-forward size of this rank; of products of routed
rows, for all experts in one call: N rows, sorted by expert, E experts, K, M sizes of an expert's weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

HAS_GROUPED_MM = hasattr(F, "grouped_mm")
"""torch 2.7.1, for which MindSpeed core_r0.16.0 is specified, does not have it."""

ROW_BYTES = 16
"""`grouped_mm` takes rows of a multiple of this size only."""

DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
"""What `grouped_mm` computes on each device, by its documentation, and on a CPU by trial (torch 2.13)."""


def grouped_linear(x_NK: torch.Tensor, weight_EMK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Rows `ends_E[e - 1]` to `ends_E[e]`, int32, times the transpose of weight e: [N, M]; the last end is N."""
    if takes_grouped_mm(x_NK, weight_EMK):
        out_NM: torch.Tensor = F.grouped_mm(x_NK, weight_EMK.transpose(1, 2), offs=ends_E)
        return out_NM
    # `apply` is untyped in torch.
    made: torch.Tensor = _OneByOne.apply(x_NK, weight_EMK, ends_E)  # type: ignore[no-untyped-call]
    return made


def takes_grouped_mm(x_NK: torch.Tensor, weight_EMK: torch.Tensor) -> bool:
    """Whether torch's grouped product exists here and takes these sizes; a rank may also have no row at all."""
    sizes = [size * x_NK.element_size() for size in weight_EMK.shape[1:]]
    return (
        HAS_GROUPED_MM
        and len(x_NK) > 0
        and x_NK.dtype in DTYPES.get(x_NK.device.type, ())
        and all(size % ROW_BYTES == 0 for size in sizes)
    )


class _OneByOne(torch.autograd.Function):
    """A product per expert; on a device the host waits for the numbers of rows."""

    @staticmethod
    def forward(ctx: Any, x_NK: torch.Tensor, weight_EMK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NK, weight_EMK)
        ctx.ends = ends_E.tolist()
        out_NM = x_NK.new_empty(len(x_NK), weight_EMK.shape[1])
        for expert, rows in _slices(ctx.ends):
            torch.mm(x_NK[rows], weight_EMK[expert].T, out=out_NM[rows])
        return out_NM

    @staticmethod
    def backward(ctx: Any, dout_NM: torch.Tensor) -> Any:
        x_NK, weight_EMK = ctx.saved_tensors
        dx_NK, dweight_EMK = torch.empty_like(x_NK), torch.empty_like(weight_EMK)
        for expert, rows in _slices(ctx.ends):
            torch.mm(dout_NM[rows], weight_EMK[expert], out=dx_NK[rows])
            torch.mm(dout_NM[rows].T, x_NK[rows], out=dweight_EMK[expert])
        return dx_NK, dweight_EMK, None


def _slices(ends: list[int]) -> list[tuple[int, slice]]:
    return [(expert, slice(start, end)) for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype (arXiv 1910.07467)."""
    return F.rms_norm(x, weight.shape, weight, eps)


def geglu(x: torch.Tensor) -> torch.Tensor:
    """gelu(first half) * second half, of [..., 2F] -> [..., F], with the approximation by tanh (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_gate(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """(up + 1) gate sigmoid(alpha gate), of [..., 2F] -> [..., F], with gate, the first half, at most `limit`, and up
    from -`limit` to `limit`: the activation of gpt-oss (arXiv 2508.10925)."""
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


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
    the log-probs consist of. `grouped_linear` is the product of each expert's rows with its weight.
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
