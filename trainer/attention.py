"""Core attention of the shared-prompt layout, put into Megatron's layers in place of its own.

Dense for now: one boolean mask over all pairs of rows, memory quadratic in the token count. It is the reference that a
faster kernel is tested against.

Shape legend: T fed tokens, H query heads, K key / value heads, D head dimension; 1 is Megatron's batch dimension.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.shared_prompt import Segments


@dataclass(kw_only=True)
class SharedPromptParams(PackedSeqParams):
    """Carries the segments through Megatron's layers to the core attention.

    The format stays "sbhd": under "thd" Megatron restarts rotary positions at 0 in every segment, wrong for responses.
    """

    segments: Segments
    qkv_format: str = "sbhd"


class DenseSharedPromptAttention(torch.nn.Module):
    """Scaled dot-product attention under the segments' dense mask."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        """Takes what Megatron's layers pass; the layer number, mask type and process groups make no difference here."""
        super().__init__()
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_T1HD: torch.Tensor,
        key_T1KD: torch.Tensor,
        value_T1KD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: SharedPromptParams,
        **_: Any,
    ) -> torch.Tensor:
        """Attention output, [T, 1, H * D]. The mask comes from the segments; Megatron's `attention_mask` is None."""
        out_1HTD = F.scaled_dot_product_attention(
            query_T1HD.permute(1, 2, 0, 3),
            key_T1KD.permute(1, 2, 0, 3),
            value_T1KD.permute(1, 2, 0, 3),
            attn_mask=packed_seq_params.segments.dense_mask_TT,
            scale=self._scale,
            enable_gqa=True,
        )
        return out_1HTD.permute(2, 0, 1, 3).flatten(2)
