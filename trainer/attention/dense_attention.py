"""Shared-prompt attention under one dense mask: the reference that kernels are checked against.

Shape legend: T query rows, S key / value rows, H query heads, K key / value heads, D head dimension.
"""

import torch
import torch.nn.functional as F

from trainer.attention.segments import Segments


def dense_attention(
    query_THD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, segments: Segments, scale: float
) -> torch.Tensor:
    """Attention output [T, H, D] under `segments.dense_mask_TS`; time and memory are quadratic in the row count."""
    out_1HTD = F.scaled_dot_product_attention(
        query_THD.transpose(0, 1)[None],
        key_SKD.transpose(0, 1)[None],
        value_SKD.transpose(0, 1)[None],
        attn_mask=segments.dense_mask_TS,
        scale=scale,
        enable_gqa=True,
    )
    return out_1HTD[0].transpose(0, 1)
