"""Multi-head latent attention (arXiv 2405.04434, section 2.1), in place of Megatron's: `trainer/model/gpt.py` sets it.

Keys and values of all heads are made of one latent per row, and all heads share one rotated part of the key. What makes
latents is whole on every tensor-parallel rank, and runs on the rank's own rows only; the projections from latents to
heads are divided by heads. So the rows of the shared key are gathered, and its gradients, of which each rank has those
of its own heads, are summed and scattered. Megatron's own (0.16.1) divides the first projections, too, and does not sum
them.

Shape legend: T fed rows, S this rank's share of them, A heads of this rank, N, R and V dimensions of a head's unrotated
and rotated query and of its value, C latent size, H hidden size; 1 is Megatron's batch dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from async_rl.shared.model_parts import Latents
from trainer.attention.core_attention import SharedPromptAttention, SharedPromptParams

Norm = Callable[[TransformerConfig, int, float], torch.nn.Module]

LATENT_NORM_EPS = 1e-6
"""Of the latents' norms, whatever rms_norm_eps is, as in transformers and DeepSeek's own code."""


class LatentAttention(MegatronModule):
    """[S, 1, H] -> [S, 1, H]; takes the arguments of Megatron's attention layers, most of which mean nothing here."""

    def __init__(self, config: TransformerConfig, layer_number: int, *, latents: Latents, norm: Norm, **_: Any) -> None:
        super().__init__(config=config)
        self._latents = latents
        heads, hidden = config.num_attention_heads, config.hidden_size
        if latents.q_rank is not None:
            self.linear_q_down = _Whole(config, hidden, latents.q_rank)
            self.q_layernorm = norm(config, latents.q_rank, LATENT_NORM_EPS)
        self.linear_q_up = _by_heads(config, latents.q_rank or hidden, heads * (latents.nope_dim + latents.rope_dim))
        self.linear_kv_down = _Whole(config, hidden, latents.kv_rank + latents.rope_dim)
        self.kv_layernorm = norm(config, latents.kv_rank, LATENT_NORM_EPS)
        self.linear_kv_up = _by_heads(config, latents.kv_rank, heads * (latents.nope_dim + latents.value_dim))
        self.core_attention = SharedPromptAttention(config, layer_number, config.softmax_scale)
        self.linear_proj = RowParallelLinear(
            heads * latents.value_dim,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(
        self, hidden_S1H: torch.Tensor, attention_mask: None, *, packed_seq_params: SharedPromptParams, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """(Output; no bias)."""
        sizes, params = self._latents, packed_seq_params
        query_S1C = hidden_S1H if sizes.q_rank is None else self.q_layernorm(self.linear_q_down(hidden_S1H))
        query_T1AD = self.linear_q_up(query_S1C)[0].unflatten(-1, (-1, sizes.nope_dim + sizes.rope_dim))
        latent_S1C, rotary_S1R = self.linear_kv_down(hidden_S1H).split([sizes.kv_rank, sizes.rope_dim], -1)
        kv_T1A = self.linear_kv_up(self.kv_layernorm(latent_S1C))[0]
        key_T1AN, value_T1AV = kv_T1A.unflatten(-1, (-1, sizes.nope_dim + sizes.value_dim)).split(
            [sizes.nope_dim, sizes.value_dim], -1
        )
        rotary_T1R = gather_from_sequence_parallel_region(rotary_S1R)
        rotary_T1AR = self._rotate(rotary_T1R[:, :, None], params).expand(*key_T1AN.shape[:3], -1)
        query_T1AN, query_T1AR = query_T1AD.split([sizes.nope_dim, sizes.rope_dim], -1)
        query_T1AD = torch.cat([query_T1AN, self._rotate(query_T1AR, params)], -1)
        out_T1 = self.core_attention(
            query_T1AD, torch.cat([key_T1AN, rotary_T1AR], -1), value_T1AV, None, packed_seq_params=params
        )
        out_S1H: torch.Tensor = self.linear_proj(out_T1)[0]
        return out_S1H, None

    def _rotate(self, x_T1AR: torch.Tensor, params: SharedPromptParams) -> torch.Tensor:
        """Rotated; of interleaved pairs the first ones of all stand before the second ones then."""
        x_TAR = x_T1AR[:, 0]
        if self._latents.interleaved:
            x_TAR = x_TAR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return params.ops.rotary(x_TAR, *params.rotation)[:, None]


class _Whole(torch.nn.Module):
    """A linear layer that is whole on every tensor-parallel rank, each of which has other rows."""

    def __init__(self, config: TransformerConfig, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_out, num_in, dtype=config.params_dtype))
        # Makes Megatron sum its gradients over the ranks that share the rows.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def _by_heads(config: TransformerConfig, num_in: int, num_out: int) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        num_in, num_out, config=config, init_method=config.init_method, bias=False, gather_output=False
    )
