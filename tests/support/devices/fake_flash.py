"""A substitute for PyTorch's two CUDA flash operators in their varlen form, computed in plain PyTorch on a CPU.

Semantics and errors are those of `mha_varlen_fwd` and `mha_varlen_bwd` in PyTorch's
aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp; memory that the kernels would read unchecked is
checked. Results are computed in float64 and rounded to the operators' dtypes.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class FakeFlash:
    """`dtypes` are those it accepts; if float64 is among them, log-sum-exps are float64 too, for more precise tests."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def forward(
        self,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(output, log-sum-exps [H, M], rng state, unused, debug mask)."""
        self._require(query_MHD, key_SKD, value_SKD, cum_seq_q, cum_seq_k, max_q, max_k)
        assert dropout_p == 0.0 and not return_debug_mask and scale is not None
        _check(window_size_left is None or (is_causal and window_size_right == 0), "windows here are causal")
        out_MHD = torch.empty_like(query_MHD)
        lse_HM = torch.empty(query_MHD.shape[1], len(query_MHD), dtype=_lse_dtype(query_MHD))
        for q, kv in _entries(cum_seq_q, cum_seq_k):
            scores_HMS = _scores(query_MHD[q], key_SKD[kv], scale, is_causal, window_size_left)
            lse_HM[:, q] = scores_HMS.logsumexp(-1).to(lse_HM.dtype)
            values_SHD = _expanded(value_SKD[kv], query_MHD.shape[1])
            out_MHD[q] = torch.einsum("hms,shd->mhd", scores_HMS.softmax(-1), values_SHD).to(out_MHD.dtype)
        return out_MHD, lse_HM, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def backward(
        self,
        grad_out: torch.Tensor,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: torch.Tensor,
        unused: torch.Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) in the shapes of query, key and value, from the given output and log-sum-exps."""
        self._require(query_MHD, key_SKD, value_SKD, cum_seq_q, cum_seq_k, max_q, max_k)
        assert dropout_p == 0.0 and scale is not None
        _check(window_size_left is None or (is_causal and window_size_right == 0), "windows here are causal")
        _check(grad_out.shape == out_MHD.shape == query_MHD.shape, "grad_out and out need query's shape")
        _check(grad_out.dtype == out_MHD.dtype == query_MHD.dtype, "grad_out and out need query's dtype")
        _check(grad_out.stride(-1) == out_MHD.stride(-1) == 1, "grad_out and out need a dense last dimension")
        _check(lse_HM.shape == (query_MHD.shape[1], len(query_MHD)), f"lse has shape {tuple(lse_HM.shape)}")
        _check(lse_HM.is_contiguous() and lse_HM.dtype == _lse_dtype(query_MHD), "lse is read as dense float32 memory")
        grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (query_MHD, key_SKD, value_SKD)]
        num_heads, num_kv_heads = query_MHD.shape[1], key_SKD.shape[1]
        for q, kv in _entries(cum_seq_q, cum_seq_k):
            scores_HMS = _scores(query_MHD[q], key_SKD[kv], scale, is_causal, window_size_left)
            probs_HMS = (scores_HMS - lse_HM[:, q, None].double()).exp()
            dout_MHD = grad_out[q].double()
            delta_HM1 = (dout_MHD * out_MHD[q].double()).sum(-1).T[..., None]
            dprobs_HMS = torch.einsum("mhd,shd->hms", dout_MHD, _expanded(value_SKD[kv], num_heads))
            dscores_HMS = probs_HMS * (dprobs_HMS - delta_HM1) * scale
            grads[0][q] = torch.einsum("hms,shd->mhd", dscores_HMS, _expanded(key_SKD[kv], num_heads))
            dkey_SHD = torch.einsum("hms,mhd->shd", dscores_HMS, query_MHD[q].double())
            dvalue_SHD = torch.einsum("hms,mhd->shd", probs_HMS, dout_MHD)
            grads[1][kv] = dkey_SHD.unflatten(1, (num_kv_heads, -1)).sum(2)
            grads[2][kv] = dvalue_SHD.unflatten(1, (num_kv_heads, -1)).sum(2)
        dquery, dkey, dvalue = (grad.to(query_MHD.dtype) for grad in grads)
        return dquery, dkey, dvalue

    def _require(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: torch.Tensor,
        cum_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
    ) -> None:
        _check(query.dtype in self.dtypes, "FlashAttention only support fp16 and bf16 data type")
        _check(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
        _check(all(x.stride(-1) == 1 for x in (query, key, value)), "Input tensor must have contiguous last dimension")
        _check(query.shape[1] % key.shape[1] == 0 and key.shape == value.shape, "heads do not divide")
        _check(query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "head_size")
        for cum, longest, rows in ((cum_seq_q, max_q, len(query)), (cum_seq_k, max_k, len(key))):
            _check(cum.dtype == torch.int32 and cum.is_contiguous(), "cu_seqlens must be dense int32")
            _check(cum[0] == 0 and cum[-1] == rows, f"cu_seqlens {cum.tolist()} for {rows} rows")
            _check(longest == int(cum.diff().max()), f"longest entry given as {longest}")
        _check(len(cum_seq_q) == len(cum_seq_k), "numbers of entries differ")


def _check(holds: bool | torch.Tensor, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _lse_dtype(query: torch.Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _entries(cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for q, kv in zip(pairwise(cum_seq_q.tolist()), pairwise(cum_seq_k.tolist()), strict=True):
        yield slice(*q), slice(*kv)


def _expanded(x_SKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x_SKD.double().repeat_interleave(num_heads // x_SKD.shape[1], dim=1)


def _scores(
    query_MHD: torch.Tensor, key_SKD: torch.Tensor, scale: float, causal: bool, before: int | None
) -> torch.Tensor:
    scores_HMS = torch.einsum("mhd,shd->hms", query_MHD.double(), _expanded(key_SKD, query_MHD.shape[1])) * scale
    if causal:
        # Aligned at the bottom right: the last query attends to the last key.
        num_q, num_kv = scores_HMS.shape[1:]
        scores_HMS.masked_fill_(torch.ones(num_q, num_kv).triu(1 + num_kv - num_q).bool(), -torch.inf)
        if before is not None:
            scores_HMS.masked_fill_(torch.ones(num_q, num_kv).tril(num_kv - num_q - before - 1).bool(), -torch.inf)
    return scores_HMS
