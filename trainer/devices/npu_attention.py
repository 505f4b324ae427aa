"""Flash attention over packed sequences on an Ascend NPU, by `npu_fusion_attention` in its TND layout.

Properties of the operator that this code relies on, from torch_npu-npu_fusion_attention.md in Ascend/op-plugin: lengths
are Python integers, cumulative, without a leading 0, at most 1024 of them; True in a mask means masked out; causal
modes take one compressed mask of 2048 x 2048, whatever the lengths; without a mask attention is full and the mode is
ignored. The band mode attends to `pre_tockens` keys before the diagonal, which ends at the last query and key, and to
`next_tockens` after it. Maximum and sum of each row's softmax are returned as float32 [T, N, 8], each number eight
times, and in the order of the rows only with `softmax_layout="TND"` (op-plugin 7.2 or newer). The backward computes P =
exp(s - max) / sum from its arguments: with max = log-sum-exp of a whole softmax and sum = 1 it works for one part of
that softmax.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension, 8 the operator's
copies of each statistic.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from trainer.devices.attention_part import Part

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LAYOUT = "TND"
MAX_ENTRIES = 1024
"""Maximum number of sequences in one call; more are split over several calls."""

MASK_SIZE = 2048
FULL, RIGHT_DOWN_CAUSAL, BAND = 0, 3, 4
"""Sparse modes."""

STATISTIC_COPIES = 8


@dataclass(frozen=True)
class NPUAttention:
    """One operator call for each 1024 entries of a part. Other dtypes are refused with a NotImplementedError.

    `torch_npu` is the module with the operators; if None, it is imported on first use.
    """

    torch_npu: ModuleType | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES

    @property
    def _ops(self) -> ModuleType:
        return self.torch_npu or import_module("torch_npu")

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if query_MHD.dtype not in self.dtypes:
            raise NotImplementedError(f"attention on an NPU takes float16, bfloat16 or float32, not {query_MHD.dtype}")
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        for q, kv, options in _calls(part, query_MHD):
            out_MHD, max_MH8, sum_MH8 = self._ops.npu_fusion_attention(
                *_dense(query_MHD[q], key_SKD[kv], value_SKD[kv]), scale=scale, **options
            )[:3]
            outs.append(out_MHD)
            lses.append((max_MH8[..., 0] + sum_MH8[..., 0].log()).T)
        return _joined(outs, 0), _joined(lses, 1)

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
        grads: list[tuple[torch.Tensor, ...]] = []
        for q, kv, options in _calls(part, query_MHD):
            max_MH8 = lse_HM[:, q].T[..., None].expand(-1, -1, STATISTIC_COPIES).contiguous()
            gradients = self._ops.npu_fusion_attention_grad(
                *_dense(query_MHD[q], key_SKD[kv], value_SKD[kv], dout_MHD[q]),
                softmax_max=max_MH8,
                softmax_sum=torch.ones_like(max_MH8),
                attention_in=out_MHD[q].contiguous(),
                scale_value=scale,
                **options,
            )
            grads.append(tuple(gradients[:3]))
        dquery_MHD, dkey_SKD, dvalue_SKD = (_joined(list(parts), 0) for parts in zip(*grads, strict=True))
        return dquery_MHD, dkey_SKD, dvalue_SKD


def _calls(part: Part, query_MHD: torch.Tensor) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """(query rows, key rows, operator arguments) of each call."""
    q_start = kv_start = 0
    for first in range(0, len(part.q_lens), MAX_ENTRIES):
        entries = slice(first, first + MAX_ENTRIES)
        q_ends, kv_ends = (list(accumulate(lens[entries])) for lens in (part.q_lens, part.kv_lens))
        options = {
            "head_num": query_MHD.shape[1],
            "input_layout": LAYOUT,
            "atten_mask": _compressed_causal_mask(query_MHD.device) if part.causal else None,
            **_sparse_mode(part),
            "keep_prob": 1.0,
            "actual_seq_qlen": q_ends,
            "actual_seq_kvlen": kv_ends,
            "softmax_layout": LAYOUT,
        }
        yield slice(q_start, q_start + q_ends[-1]), slice(kv_start, kv_start + kv_ends[-1]), options
        q_start += q_ends[-1]
        kv_start += kv_ends[-1]


def _sparse_mode(part: Part) -> dict[str, int]:
    if part.window is not None:
        return {"sparse_mode": BAND, "pre_tockens": part.window - 1, "next_tockens": 0}
    return {"sparse_mode": RIGHT_DOWN_CAUSAL if part.causal else FULL}


@functools.cache
def _compressed_causal_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(diagonal=1)


def _dense(*tensors: torch.Tensor) -> list[torch.Tensor]:
    # The documentation does not specify behaviour for other strides.
    return [tensor.contiguous() for tensor in tensors]


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
