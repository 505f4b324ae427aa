"""The products of rows with the weights of the experts that they are routed to: one call for all experts.

Shape legend: N rows, sorted by expert; E experts; K, M sizes of an expert's weight.
"""

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
