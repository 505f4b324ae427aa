"""Megatron's attention with a gate for each output, as Qwen3-Next has it; `trainer/model/gpt.py` sets it.

A query head and its gate follow each other in the projection, as in checkpoints: per key / value head its query heads,
each with its gate, then its key, then its value. Megatron's own order (0.16.1) puts all gates behind the queries, and
it has none where ranks share key / value heads.

Shape legend: S this rank's share of the rows, T all fed rows, A query heads and K key / value heads of this rank, D
head dimension, H hidden size; 1 is Megatron's batch dimension.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention


class GatedAttention(SelfAttention):
    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: None = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[S, 1, H] -> (queries [T, 1, A, D], keys and values [T, 1, K, D], gates [T, 1, A, D])."""
        made, _ = self.linear_qkv(hidden_states)
        num_kv_heads, rank = self.config.num_query_groups, self.pg_collection.tp.rank()
        ranks_per_head = max(1, self.world_size // num_kv_heads)
        if ranks_per_head > 1:
            # Ranks share a key / value head: each takes that of its query heads from the product of them all.
            made = all_gather_last_dim_from_tensor_parallel_region(made)
            made = made.chunk(num_kv_heads, dim=-1)[rank // ranks_per_head]
        dim = self.hidden_size_per_attention_head
        heads = made.unflatten(-1, (self.num_query_groups_per_partition, -1, dim))
        queries_and_gates, key, value = heads.split([heads.shape[-2] - 2, 1, 1], dim=-2)
        pairs = queries_and_gates.unflatten(-2, (-1, 2)).flatten(2, 3)
        pairs = pairs.chunk(ranks_per_head, dim=2)[rank % ranks_per_head]
        return self.q_layernorm(pairs[..., 0, :]), self.k_layernorm(key[..., 0, :]), value[..., 0, :], pairs[..., 1, :]

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate.reshape(x.shape))
