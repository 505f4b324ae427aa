"""Attention over the paged cache without a mask over all sequences: each query attends to its own keys only.

transformers' own path for CPU builds one mask of [all queries, all keys of the batch] and computes every product in it;
its cost grows with the square of the number of running sequences. Here a step of single queries (decoding) is one
batched product padded to the longest sequence, and longer queries (prefill) are computed one sequence at a time.

Shapes: S sequences, H heads, K key-value heads, G = H / K, D head size, T queries of all sequences, L keys of one.
"""

from typing import Any, Final

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.generation.continuous_batching import PagedAttentionCache

NAME: Final = "ragged_paged"


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    cache: PagedAttentionCache,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Writes the new keys and values to the cache and attends; called by every attention layer of the model.

    `query` is [1, H, T, D]; `key` and `value` are [1, K, T, D]. Returns [1, T, H, D]. The sequence boundaries are in
    `kwargs` (`cu_seq_lens_q`, `cu_seq_lens_k`), set by continuous batching.
    """
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    _, num_heads, num_queries, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query_TKGD = query[0].transpose(0, 1).reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    # Keys of all sequences, one after the other: [sum of L, K, D].
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    query_bounds, key_bounds = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    num_sequences = query_bounds.shape[0] - 1
    if kwargs["max_length_q"] == 1 and query_TKGD.shape[0] == num_sequences:
        output = _attend_single(query_TKGD, keys, values, key_bounds[:-1], key_bounds.diff(), scaling)
    else:
        output = _attend_mixed(query_TKGD, keys, values, query_bounds, key_bounds, scaling)
    return output.flatten(1, 2).unsqueeze(0), None


def _attend_mixed(
    query_TKGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    output = torch.empty_like(query_TKGD)
    starts, ends = query_bounds[:-1], query_bounds[1:]
    single_S = (ends - starts) == 1
    if bool(single_S.any()):
        at = starts[single_S].long()
        output[at] = _attend_single(
            query_TKGD[at], keys, values, key_bounds[:-1][single_S], key_bounds.diff()[single_S], scaling
        )
    for i in (~single_S & (ends > starts)).nonzero().flatten().tolist():
        q, k = slice(int(starts[i]), int(ends[i])), slice(int(key_bounds[i]), int(key_bounds[i + 1]))
        output[q] = _attend_span(query_TKGD[q], keys[k], values[k], scaling)
    return output


def _attend_single(
    query_SKGD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_starts_S: torch.Tensor,
    key_lengths_S: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """One query per sequence: the G query heads of a key-value head are the rows of one small product."""
    num_sequences, num_kv_heads, _, head_dim = query_SKGD.shape
    place_L = torch.arange(int(key_lengths_S.max()), device=keys.device)
    inside_SL = place_L < key_lengths_S.unsqueeze(-1)
    # Positions after a sequence's end read its first key, which the mask excludes.
    index_SL = key_starts_S.unsqueeze(-1) + place_L * inside_SL
    shape = (num_sequences, place_L.shape[0], num_kv_heads, head_dim)
    padded_keys = keys.index_select(0, index_SL.flatten()).view(shape)
    padded_values = values.index_select(0, index_SL.flatten()).view(shape)
    return F.scaled_dot_product_attention(
        query_SKGD,
        padded_keys.transpose(1, 2),
        padded_values.transpose(1, 2),
        attn_mask=inside_SL[:, None, None, :],
        scale=scaling,
    )


def _attend_span(query_QKGD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Several queries of one sequence, for its last positions: causal, aligned to the last key."""
    num_queries, num_keys = query_QKGD.shape[0], keys.shape[0]
    causal_QL = torch.ones(num_queries, num_keys, dtype=torch.bool, device=keys.device).tril(num_keys - num_queries)
    heads_first = query_QKGD.permute(1, 2, 0, 3)
    output = F.scaled_dot_product_attention(
        heads_first,
        keys.transpose(0, 1).unsqueeze(1).expand(-1, heads_first.shape[1], -1, -1),
        values.transpose(0, 1).unsqueeze(1).expand(-1, heads_first.shape[1], -1, -1),
        attn_mask=causal_QL,
        scale=scaling,
    )
    return output.permute(2, 0, 1, 3)


AttentionInterface.register(NAME, ragged_attention)
