"""Attention composed of matrix products, on any device, dtype and head dimension: stands in for a device's kernel.

Slower than a flash kernel, but like one it never holds the scores of more than `QUERY_BLOCK` query rows at a time, and
its backward computes them again: memory is linear in the rows. Products and softmax are in float32 or wider.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, G = H / K, D head dimension; in a
block of one entry Q queries and L keys.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from trainer.devices.attention_part import Part

QUERY_BLOCK = 256


class ComposedAttention:
    """The kernel of `trainer.devices.AttentionKernel`."""

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_MHD = torch.empty_like(query_MHD, memory_format=torch.contiguous_format)
        lse_HM = query_MHD.new_empty(query_MHD.shape[1::-1], dtype=_wide(query_MHD.dtype))
        num_kv_heads = key_SKD.shape[1]
        for block in _blocks(part):
            scores = _scores(query_MHD, key_SKD, block, scale)
            lse_KGQ = scores.logsumexp(-1)
            values_K1LD = _keys(value_SKD, block)
            out = torch.matmul((scores - lse_KGQ.unsqueeze(-1)).exp_(), values_K1LD)
            out_MHD[block.queries] = _flat(out).to(out_MHD.dtype)
            lse_HM[:, block.queries] = lse_KGQ.reshape(num_kv_heads * lse_KGQ.shape[1], -1)
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
        dtype, num_kv_heads = query_MHD.dtype, key_SKD.shape[1]
        dquery_MHD = torch.empty_like(query_MHD, memory_format=torch.contiguous_format)
        dkey_SKD, dvalue_SKD = (torch.zeros(x.shape, dtype=_wide(dtype), device=x.device) for x in (key_SKD, value_SKD))
        for block in _blocks(part):
            query, dout, out = (_queries(x, num_kv_heads, block) for x in (query_MHD, dout_MHD, out_MHD))
            keys, values = _keys(key_SKD, block), _keys(value_SKD, block)
            lse_KGQ = lse_HM[:, block.queries].reshape(num_kv_heads, -1, dout.shape[2])
            probs = (_scores(query_MHD, key_SKD, block, scale) - lse_KGQ.unsqueeze(-1)).exp_()
            delta = (dout * out).sum(-1, keepdim=True)
            dscores = torch.matmul(dout, values.transpose(-1, -2)).sub_(delta).mul_(probs).mul_(scale)
            dquery_MHD[block.queries] = _flat(torch.matmul(dscores, keys)).to(dtype)
            dkey_SKD[block.keys] += torch.matmul(dscores.transpose(-1, -2), query).sum(1).transpose(0, 1)
            dvalue_SKD[block.keys] += torch.matmul(probs.transpose(-1, -2), dout).sum(1).transpose(0, 1)
        return dquery_MHD, dkey_SKD.to(dtype), dvalue_SKD.to(dtype)


class _Block(NamedTuple):
    """Rows of one entry's queries and of the keys that any of them attends to; a causal one's last key is its last."""

    queries: slice
    keys: slice
    causal: bool
    window: int | None


def _blocks(part: Part) -> Iterator[_Block]:
    q_ends, kv_ends = (accumulate(lens, initial=0) for lens in (part.q_lens, part.kv_lens))
    for (q_start, q_end), (kv_start, kv_end) in zip(pairwise(q_ends), pairwise(kv_ends), strict=True):
        for start in range(q_start, q_end, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, q_end)
            last_key = kv_end - (q_end - end) if part.causal else kv_end
            first_key = kv_start
            if part.window is not None:
                first_key = max(kv_start, last_key - (end - start) - part.window + 1)
            yield _Block(slice(start, end), slice(first_key, last_key), part.causal, part.window)


def _scores(query_MHD: torch.Tensor, key_SKD: torch.Tensor, block: _Block, scale: float) -> torch.Tensor:
    """[K, G, Q, L], with -inf where a query does not attend."""
    query = _queries(query_MHD, key_SKD.shape[1], block)
    scores = torch.matmul(query, _keys(key_SKD, block).transpose(-1, -2)).mul_(scale)
    if block.causal:
        num_queries, num_keys = scores.shape[-2:]
        everywhere = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
        is_outside = everywhere.triu(1 + num_keys - num_queries)
        if block.window is not None:
            is_outside |= everywhere.tril(num_keys - num_queries - block.window)
        scores.masked_fill_(is_outside, -torch.inf)
    return scores


def _queries(x_MHD: torch.Tensor, num_kv_heads: int, block: _Block) -> torch.Tensor:
    """[K, G, Q, D], float32 or wider."""
    x = x_MHD[block.queries].transpose(0, 1)
    return x.reshape(num_kv_heads, -1, *x.shape[1:]).to(_wide(x.dtype))


def _keys(x_SKD: torch.Tensor, block: _Block) -> torch.Tensor:
    """[K, 1, L, D], float32 or wider."""
    return x_SKD[block.keys].transpose(0, 1).unsqueeze(1).to(_wide(x_SKD.dtype))


def _flat(x_KGQD: torch.Tensor) -> torch.Tensor:
    """[Q, H, D]."""
    return x_KGQD.flatten(0, 1).transpose(0, 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
