"""The core attention that Megatron's layers call, and the packed_seq_params that are passed to it.

Shape legend: T fed rows of this rank, S key / value rows, H query heads, K key / value heads, D head dimension; 1 is
Megatron's batch dimension.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from async_rl.shared.model_families import SINKS
from async_rl.shared.model_shape import ModelShape
from trainer.attention.delta_plan import DeltaPlan
from trainer.attention.head_exchange import heads_to_rows, rows_to_heads
from trainer.attention.prompt_cache import PromptCache
from trainer.attention.segments import Segments
from trainer.attention.shared_attention import shared_prompt_attention
from trainer.devices import AttentionKernel
from trainer.devices.layer_ops import LayerOps


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles of each row."""

    cos_T1D: torch.Tensor
    sin_T1D: torch.Tensor


@dataclass(kw_only=True)
class SharedPromptParams(PackedSeqParams):
    """Passes the segments through Megatron's layers to the core attention.

    The rotary angles are included, by position: Megatron's own would number the rows, or restart at 0 in every segment.
    Layers in `unrotated_layers`, by Megatron's numbers from 1, do without. Layers with a window have angles of their
    own, which may be the same. `query_scale_T11` multiplies the queries. `delta_plan` is for layers with a gated delta
    net. Angles and scales are those of this rank's rows, segments of all. `cp_group` are the ranks that share the rows,
    None for one. The format stays "sbhd", for which Megatron does not rearrange the rows.
    """

    segments: Segments
    rotation: Rotation
    local_rotation: Rotation
    ops: LayerOps
    kernel: AttentionKernel | None
    cache: PromptCache | None = None
    query_scale_T11: torch.Tensor | None = None
    delta_plan: DeltaPlan | None = None
    routes_TW: torch.Tensor | None = None
    """`Rows.routes_TW`, for the layers with experts."""
    qkv_format: str = "sbhd"

    def kept(self, layer: int, name: str) -> torch.Tensor:
        """What a layer has stored of the prompt in the first of two stages."""
        assert self.cache is not None, "responses without their prompt have its cache"
        return self.cache.kept(layer, name)


class SharedPromptAttention(torch.nn.Module):
    """Scaled dot-product attention of the shared-prompt layout, in place of Megatron's own."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        *,
        shape: ModelShape | None = None,
        **_: Any,
    ) -> None:
        """Accepts the arguments of Megatron's layers; mask type and process groups are ignored.

        Args:
            shape: the model's; without it, queries and keys are rotated where they come from, and attend to all,
                without sinks.
        """
        super().__init__()
        self._layer_number = layer_number
        self._rotates = shape is not None and layer_number not in shape.unrotated_layers
        self._window = shape.window_of(layer_number) if shape else None
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.sinks: torch.nn.Parameter | None = None
        """[H], of the query heads of this tensor-parallel rank."""
        if shape is not None and shape.has(SINKS):
            num_heads = shape.num_heads // config.tensor_model_parallel_size
            self.sinks = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)

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
        """Attention output, [T, 1, H * D]. The segments define which rows attend to which; `attention_mask` is None.

        Values may be of another size than keys, and the output is then; the kernels take one size.
        """
        params = packed_seq_params
        query_THD, key_SKD, value_SKD = query_T1HD[:, 0], key_T1KD[:, 0], value_T1KD[:, 0]
        if self._rotates:
            rotation = params.rotation if self._window is None else params.local_rotation
            query_THD, key_SKD = (_rotated(rows, rotation, params.ops) for rows in (query_THD, key_SKD))
        if params.query_scale_T11 is not None:
            query_THD = query_THD * params.query_scale_T11
        if params.cp_group is not None:
            query_THD, key_SKD, value_SKD = rows_to_heads((query_THD, key_SKD, value_SKD), params.cp_group)
        if params.cache is not None:
            key_SKD, value_SKD = params.cache.extend(self._layer_number, key_SKD, value_SKD)
        sinks_H = self.sinks
        if sinks_H is not None and params.cp_group is not None:
            sinks_H = sinks_H.chunk(params.cp_group.size())[params.cp_group.rank()]
        size = value_SKD.shape[-1]
        if size != key_SKD.shape[-1]:
            query_THD, key_SKD, value_SKD = _of_one_size(query_THD, key_SKD, value_SKD)
        out_THD = shared_prompt_attention(
            query_THD,
            key_SKD,
            value_SKD,
            params.segments,
            self._scale,
            params.kernel,
            params.ops.merge,
            self._window,
            sinks_H,
        )
        out_THD = out_THD[..., :size]
        if params.cp_group is not None:
            out_THD = heads_to_rows(out_THD, params.cp_group)
        return out_THD.flatten(1)[:, None]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> ShardedStateDict:
        """For checkpoints: sinks are divided by heads."""
        own = {} if self.sinks is None else {"sinks": self.sinks}
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets
        )
        return sharded


def _of_one_size(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """With zeros behind, which change neither the products of queries and keys nor the values before them."""
    size = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]


def _rotated(x_THD: torch.Tensor, rotation: Rotation, ops: LayerOps) -> torch.Tensor:
    """The first dimensions, as many as there are angles, rotated."""
    size = rotation.cos_T1D.shape[-1]
    rotated = ops.rotary(x_THD[..., :size], *rotation)
    return rotated if size == x_THD.shape[-1] else torch.cat([rotated, x_THD[..., size:]], -1)
