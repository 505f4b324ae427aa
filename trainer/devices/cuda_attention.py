"""Flash attention over packed sequences on CUDA, by the kernel that PyTorch includes.

Properties of the two operators that this code relies on, from `mha_varlen_fwd` and `mha_varlen_bwd` in PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: fp16 and bf16 only, Ampere or newer, head dimension a
multiple of 8 and at most 256; rows may have any stride, but their last dimension must be dense; key / value heads may
divide the query heads, and the backward sums their gradients itself, so dk and dv have the shapes of k and v;
log-sum-exps are [H, M], and the backward reads them through a raw pointer: a view of some columns must be made
contiguous. Causal queries are aligned with the last keys; with a window a query at key i also attends to the
`window_size_left` keys before it only.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.devices.attention_part import Part

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class CUDAAttention:
    """One kernel call per part. Other dtypes and head dimensions are refused with a NotImplementedError."""

    flash: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    flash_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward
    dtypes: tuple[torch.dtype, ...] = DTYPES

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._require_supported(query_MHD)
        out_MHD, lse_HM, *_ = self.flash(
            *_dense_rows(query_MHD, key_SKD, value_SKD),
            *_layout(part),
            0.0,
            part.causal,
            False,
            scale=scale,
            **_window(part),
        )
        return out_MHD, lse_HM

    def backward(
        self,
        dout_MHD: torch.Tensor,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        part: Part,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Both are read only with dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=query_MHD.device)
        unused = torch.empty(0, device=query_MHD.device)
        dquery_MHD, dkey_SKD, dvalue_SKD = self.flash_backward(
            *_dense_rows(dout_MHD, query_MHD, key_SKD, value_SKD, out_MHD),
            lse_HM.contiguous(),
            *_layout(part),
            0.0,
            part.causal,
            rng_state,
            unused,
            scale=scale,
            **_window(part),
        )
        return dquery_MHD, dkey_SKD, dvalue_SKD

    def _require_supported(self, query_MHD: torch.Tensor) -> None:
        head_dim = query_MHD.shape[-1]
        if query_MHD.dtype not in self.dtypes:
            raise NotImplementedError(f"flash attention on CUDA takes float16 or bfloat16, not {query_MHD.dtype}")
        if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
            raise NotImplementedError(
                f"flash attention on CUDA takes head dimensions that are multiples of {HEAD_DIM_MULTIPLE} and at most "
                f"{MAX_HEAD_DIM}, not {head_dim}"
            )


def _layout(part: Part) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Offsets of queries and keys on the device, and the longest entry of each as an integer on the host."""
    return part.cu_seqlens_q, part.cu_seqlens_k, max(part.q_lens), max(part.kv_lens)


def _window(part: Part) -> dict[str, int]:
    return {} if part.window is None else {"window_size_left": part.window - 1, "window_size_right": 0}


def _dense_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
