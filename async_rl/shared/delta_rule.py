"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464), by chunks of rows; plain products for any device.

What trainer and embedded engine compute of these layers: the rule, how sequences lie in chunks, and the convolution.

A value head has a state S, [K, V], which is 0 at first. A row with query q, key k, value v, decay e^g and rate b makes
of it, and reads from it (equation 10 of the paper, transposed),

    S_t = e^g (S_t-1 - b k (k^T S_t-1)) + b k v^T,    out = q^T S_t.

The rows of a chunk at once (section 3.3): with c the sums of g from the chunk's beginning,

    A_ij = b_i e^(c_i - c_j) k_i . k_j for j < i, else 0,    M = (I + A)^-1,
    U = M (b v),    Z = M (b e^c k),    X = U - Z S,
    out = (e^c q) S + D X with D_ij = e^(c_i - c_j) q_i . k_j for j <= i,
    S' = e^(c_last) S + (e^(c_last - c) k)^T X.

Only the last two lines have to go from chunk to chunk. c_i - c_j is at most 0 for j <= i, so nothing overflows.

Shape legend: N chunks, C rows of each, a power of two, H key heads, R value heads of each, K and V dimensions of a key
and a value head, B sequences; T rows, E places of rows with the rows before them, X channels, W width of the
convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

CHUNK_ROWS = 64
"""At most, a power of two: what a chunk computes at once grows with its rows, what a sequence waits for with chunks."""

NORM_EPS = 1e-6
"""Of the lengths of queries and keys, as in transformers."""


def rows_of_chunk(longest: int) -> int:
    """Rows of each chunk where the longest sequence has so many, at least 1."""
    return min(CHUNK_ROWS, 1 << (longest - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Chunks:
    """How sequences lie in chunks: first the first chunk of every sequence, then the second of each that has one, the
    longest sequence first, so that a step over all sequences reads consecutive chunks.

    Attributes:
        order: numbers of the sequences, the longest first.
        counts: sequences that have a chunk, step by step.
        num_places: of rows, in all chunks.
        places: of each sequence those of its rows.
    """

    order: tuple[int, ...]
    counts: tuple[int, ...]
    num_places: int
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, lens: Sequence[int], chunk_rows: int) -> "Chunks":
        """Those of sequences of these lengths, of which there may be none."""
        order = sorted(range(len(lens)), key=lambda i: -lens[i])
        nums = [-(-length // chunk_rows) for length in lens]
        counts = [sum(num > step for num in nums) for step in range(max(nums, default=0))]
        firsts = list(accumulate(counts, initial=0))
        rank_of = {i: rank for rank, i in enumerate(order)}
        places = []
        for i, length in enumerate(lens):
            begins = [(firsts[step] + rank_of[i]) * chunk_rows for step in range(nums[i])]
            places.append(tuple(place for begin in begins for place in range(begin, begin + chunk_rows))[:length])
        return cls(tuple(order), tuple(counts), firsts[-1] * chunk_rows, tuple(places))


def causal_convolution(rows_EX: torch.Tensor, taps_WX: torch.Tensor, last_T: torch.Tensor) -> torch.Tensor:
    """silu of each channel's sum over the W rows that end at `last_T`, weighted by its taps: [T, X].

    float32 or wider; `last_T`, int64, is at least W - 1.
    """
    width = len(taps_WX)
    length = len(rows_EX) - width + 1
    sums_EX = rows_EX[:length] * taps_WX[0]
    for tap in range(1, width):
        sums_EX = torch.addcmul(sums_EX, rows_EX[tap : tap + length], taps_WX[tap])
    return F.silu(sums_EX.index_select(0, last_T - width + 1))


def gated_delta_rule(
    mixed_NCHX: torch.Tensor,
    rates_NCHR: torch.Tensor,
    decays_NCHR: torch.Tensor,
    state_BHRKV: torch.Tensor,
    counts: Sequence[int],
    key_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Outputs [N, C, H, R, V], final states [B, H, R, K, V]), in the dtype of the states, float32 or wider.

    Args:
        mixed_NCHX: of each key head its query, its key, and its R values; zeros where a chunk has no row.
        rates_NCHR: b.
        decays_NCHR: g, at most 0; 0 where a chunk has no row.
        state_BHRKV: what each sequence begins with.
        counts: sequences that have a chunk, step by step: descending, the longest sequence first. The chunks of a step
            follow each other.
    """
    dtype = state_BHRKV.dtype
    mixed_NHCX = mixed_NCHX.transpose(1, 2).to(dtype)
    query_NHCK, key_NHCK, values_NHCX = mixed_NHCX.split([key_dim, key_dim, mixed_NHCX.shape[-1] - 2 * key_dim], dim=-1)
    query_NHCK, key_NHCK = _unit(query_NHCK) * key_dim**-0.5, _unit(key_NHCK)
    value_NHRCV = values_NHCX.unflatten(-1, (rates_NCHR.shape[-1], -1)).transpose(2, 3)
    rate_NHRC1 = rates_NCHR.permute(0, 2, 3, 1).to(dtype)[..., None]
    sum_NHRC = decays_NCHR.permute(0, 2, 3, 1).to(dtype).cumsum(-1)

    pair_NHRCC = _pairwise(sum_NHRC)
    own_NH1CC = (key_NHCK @ key_NHCK.transpose(-1, -2))[:, :, None]
    inverse_NHRCC: torch.Tensor = _UnitInverse.apply(own_NH1CC * pair_NHRCC * rate_NHRC1)  # type: ignore[no-untyped-call]
    seen_NHRCC = (query_NHCK @ key_NHCK.transpose(-1, -2))[:, :, None] * pair_NHRCC
    factor_NHRC1 = sum_NHRC.exp()[..., None]
    key_NH1CK, query_NH1CK = key_NHCK[:, :, None], query_NHCK[:, :, None]
    written_NHRCV = inverse_NHRCC @ (value_NHRCV * rate_NHRC1)
    read_NHRCK = inverse_NHRCC @ (key_NH1CK * (rate_NHRC1 * factor_NHRC1))
    query_NHRCK = query_NH1CK * factor_NHRC1
    key_NHRKC = (key_NH1CK * (sum_NHRC[..., -1:] - sum_NHRC).exp()[..., None]).transpose(-1, -2)
    last_NHR11 = factor_NHRC1[..., -1:, :]

    parts = (written_NHRCV, read_NHRCK, query_NHRCK, seen_NHRCC, key_NHRKC, last_NHR11)
    outs, finals, state = [], [], state_BHRKV
    for count, (written, read, query, seen, key, last) in zip(
        counts, zip(*(part.split(list(counts)) for part in parts), strict=True), strict=True
    ):
        # Those that are not among the first ones any more have ended.
        finals.append(state[count:])
        state = state[:count]
        new = written - read @ state
        outs.append(query @ state + seen @ new)
        state = last * state + key @ new
    finals.append(state)
    return torch.cat(outs).permute(0, 3, 1, 2, 4), torch.cat(finals[::-1])


def _unit(x: torch.Tensor) -> torch.Tensor:
    inverse: torch.Tensor = torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    return x * inverse


def _pairwise(sum_NHRC: torch.Tensor) -> torch.Tensor:
    """e^(c_i - c_j) for j <= i, else 0."""
    difference = sum_NHRC[..., :, None] - sum_NHRC[..., None, :]
    is_later = torch.ones(difference.shape[-2:], dtype=torch.bool, device=difference.device).triu(1)
    pairwise: torch.Tensor = difference.masked_fill(is_later, -torch.inf).exp()
    return pairwise


class _UnitInverse(torch.autograd.Function):
    """(I + A)^-1 with A the part of a matrix [..., C, C] below its diagonal; with M the inverse, dA = -M^T dM M^T.

    By blocks of twice the size each time: [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. As exact as forward
    substitution, but in log2(C) steps of products. Sums of powers of A would overflow where keys repeat.
    """

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        size = matrix.shape[-1]
        inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device).expand_as(matrix).clone()
        half = 1
        while half < size:
            of_matrix, of_inverse = (_diagonal_blocks(each, 2 * half) for each in (matrix, inverse))
            first, second = slice(0, half), slice(half, 2 * half)
            lower = of_inverse[..., second, second] @ of_matrix[..., second, first] @ of_inverse[..., first, first]
            of_inverse[..., second, first] = -lower
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, dinverse: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        dmatrix: torch.Tensor = transposed @ dinverse @ transposed
        return -dmatrix.tril(-1)


def _diagonal_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """[..., C, C] -> the blocks on its diagonal, [..., C / size, size, size], a view."""
    blocks: torch.Tensor = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
