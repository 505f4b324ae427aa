"""Flash attention over packed sequences on a CPU, by PyTorch's own CPU kernel, in few calls.

The kernel takes a batch of sequences of one length. Long entries, and adjacent entries of equal length, are views of
the rows. The remaining entries, many and short and of different lengths, are gathered into batches of similar length,
padded on the right. Padding is exact: a causal row never attends to the keys after it, and the output of a padded query
row is not read; non-causal entries share a batch only where they have equally many, so that no key is padding. In
backward a padded query row has an infinite log-sum-exp, so its probabilities, and all gradients from it, are 0.

With a window, entries are divided into blocks of queries, each with the keys that any of them attends to; blocks of one
size are a batch: they share a mask, and none is padded.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension, B entries of one
kernel call, L rows of each.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from trainer.devices.attention_part import Part

MIN_VIEW_ROWS = 64
"""Number of rows from which a separate call, about 40 us more, costs less than gathering and padding."""

LENGTH_RATIO = 0.75
LENGTH_SLACK = 2
"""A batch takes entries of at least ratio times its longest, less the slack, since tiny entries cost the same."""

MAX_BATCH_ROWS = 512
"""Maximum rows of a gathered batch: it then fits the processor's cache and memory that the process already has."""

MAX_BLOCK_QUERIES, MAX_BLOCK_KEYS = 256, 4096
"""With a window: maximum queries of a block, and keys of a batch of blocks, which are copied."""

PLANS_KEPT = 64
"""Number of plans cached; the layers of the few micro-batches in flight share theirs."""

TAKES_UNEQUAL_HEADS = torch.__version__ >= "2.9"  # compared as versions, not as text
"""Whether the kernel takes fewer key / value heads than query heads; before 2.9 it then reads out of bounds, without an
error. To be removed, with the copies below, when the oldest torch of pyproject.toml is 2.9; MindSpeed core_r0.16.0
specifies 2.7.1.
"""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CPUAttention:
    """The kernel of `trainer.devices.AttentionKernel`; computes 16-bit inputs in float32, several times faster."""

    def __init__(self, takes_unequal_heads: bool = TAKES_UNEQUAL_HEADS) -> None:
        self._takes_unequal_heads = takes_unequal_heads

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = _widened(query_MHD, key_SKD, value_SKD)
        out_MHD = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse_MH = query.new_empty(query.shape[:2])
        for q, kv, is_causal, mask in _calls(part, query.dtype):
            tensors = _heads_first(q.take(query), *self._as_often(query, kv.take(key), kv.take(value)))
            out, lse = _flash(*tensors, 0.0, is_causal, attn_mask=mask, scale=scale)
            q.put(out_MHD, out.transpose(1, 2))
            q.put(lse_MH, lse.transpose(1, 2))
        return out_MHD.to(query_MHD.dtype), lse_MH.T

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
        dout, query, key, value, out = _widened(dout_MHD, query_MHD, key_SKD, value_SKD, out_MHD)
        # Without a window every row is in one call.
        empty = torch.empty_like if part.window is None else torch.zeros_like
        grads = [empty(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        for q, kv, is_causal, mask in _calls(part, query.dtype):
            taken = self._as_often(query, kv.take(key), kv.take(value))
            tensors = _heads_first(q.take(dout), q.take(query), *taken, q.take(out))
            lse = q.without_padding(q.take(lse_HM.T)).transpose(1, 2)
            parts = _flash_backward(*tensors, lse, 0.0, is_causal, attn_mask=mask, scale=scale)
            for grad, place, gradient in zip(grads, (q, kv, kv), parts, strict=True):
                place.put(grad, _summed(gradient.transpose(1, 2), grad.shape[1]))
        dquery, dkey, dvalue = (grad.to(query_MHD.dtype) for grad in grads)
        return dquery, dkey, dvalue

    def _as_often(self, query_MHD: torch.Tensor, *tensors_BLKD: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values for the kernel's heads: unchanged, or repeated for the queries that share one."""
        if self._takes_unequal_heads:
            return list(tensors_BLKD)
        return [x.repeat_interleave(query_MHD.shape[1] // x.shape[2], dim=2) for x in tensors_BLKD]


class _Entry(NamedTuple):
    """Positions of one entry's queries and keys among the rows."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class _View:
    """The rows of `batch` consecutive entries of one length."""

    start: int
    batch: int
    length: int

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [B, L, ...], a view."""
        rows_here = rows[self.start : self.start + self.batch * self.length]
        return torch.unflatten(rows_here, 0, (self.batch, self.length))

    def put(self, rows: torch.Tensor, batched: torch.Tensor) -> None:
        self.take(rows).copy_(batched)

    def without_padding(self, lse_BLH: torch.Tensor) -> torch.Tensor:
        """`lse_BLH`; there is no padding here."""
        return lse_BLH


class _Gathered:
    """The rows of any entries, in the batch's order; shorter entries are padded with copies of their last row."""

    def __init__(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        longest = max(lengths)
        steps_1L, lengths_B1 = torch.arange(longest)[None], torch.tensor(lengths)[:, None]
        rows_BL = torch.tensor(starts)[:, None] + torch.minimum(steps_1L, lengths_B1 - 1)
        is_row_BL = steps_1L < lengths_B1
        self._shape = rows_BL.shape
        self._taken = rows_BL.flatten()
        self._cells = is_row_BL.flatten().nonzero()[:, 0]
        self._rows = self._taken[self._cells]
        self._padding = (~is_row_BL).flatten().nonzero()[:, 0]

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [B, L, ...], a copy."""
        return torch.unflatten(rows.index_select(0, self._taken), 0, self._shape)

    def put(self, rows: torch.Tensor, batched: torch.Tensor) -> None:
        """Copies the entries' rows back; padded ones are left out."""
        flat = batched.flatten(0, 1)
        rows.index_copy_(0, self._rows, flat.index_select(0, self._cells) if len(self._padding) else flat)

    def without_padding(self, lse_BLH: torch.Tensor) -> torch.Tensor:
        """`lse_BLH`, with infinity in padded rows: exp(score - lse) is 0 there."""
        lse_BLH.flatten(0, 1).index_fill_(0, self._padding, torch.inf)
        return lse_BLH


class _Blocks:
    """Blocks of one length; those of keys have rows in common."""

    def __init__(self, starts: Sequence[int], length: int, *, are_keys: bool) -> None:
        rows_BL = torch.tensor(starts)[:, None] + torch.arange(length)
        self._shape, self._rows, self._are_keys = rows_BL.shape, rows_BL.flatten(), are_keys

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...] -> [B, L, ...], a copy."""
        return torch.unflatten(rows.index_select(0, self._rows), 0, self._shape)

    def put(self, rows: torch.Tensor, batched: torch.Tensor) -> None:
        """Copies queries' rows back, and adds to keys' rows, which are 0 at first."""
        put = rows.index_add_ if self._are_keys else rows.index_copy_
        put(0, self._rows, batched.flatten(0, 1))

    def without_padding(self, lse_BLH: torch.Tensor) -> torch.Tensor:
        """`lse_BLH`; there is no padding here."""
        return lse_BLH


_Place = _View | _Gathered | _Blocks


def _calls(part: Part, dtype: torch.dtype) -> Iterator[tuple[_Place, _Place, bool, torch.Tensor | None]]:
    """The kernel calls of a part: the positions of each call's queries and keys, whether it is causal, and its mask."""
    if part.window is None:
        for q, kv in _plan(part):
            yield q, kv, part.causal, None
        return
    for q_len, kv_len, blocks in _window_plan(part):
        mask = torch.zeros(q_len, kv_len, dtype=dtype)
        is_inside = torch.ones(q_len, kv_len, dtype=torch.bool).tril_(kv_len - q_len)
        is_inside.triu_(1 + kv_len - q_len - part.window)
        mask.masked_fill_(~is_inside, -torch.inf)
        yield *blocks, False, mask[None, None]


@functools.lru_cache(maxsize=PLANS_KEPT)
def _window_plan(part: Part) -> tuple[tuple[int, int, tuple[_Blocks, _Blocks]], ...]:
    """(queries, keys of each block; the blocks), a batch each."""
    assert part.window is not None
    by_size: dict[tuple[int, int], list[tuple[int, int]]] = {}
    step = min(max(part.window, MIN_VIEW_ROWS), MAX_BLOCK_QUERIES)
    q_ends, kv_ends = accumulate(part.q_lens), accumulate(part.kv_lens)
    for q_end, q_len, kv_end, kv_len in zip(q_ends, part.q_lens, kv_ends, part.kv_lens, strict=True):
        for start in range(q_end - q_len, q_end, step):
            length = min(step, q_end - start)
            last_key = kv_end - (q_end - start - length)
            num_keys = min(last_key - kv_end + kv_len, length + part.window - 1)
            by_size.setdefault((length, num_keys), []).append((start, last_key - num_keys))
    batches = []
    for (q_len, kv_len), found in by_size.items():
        most = max(1, MAX_BLOCK_KEYS // kv_len)
        for first in range(0, len(found), most):
            q_starts, kv_starts = zip(*found[first : first + most], strict=True)
            blocks = _Blocks(q_starts, q_len, are_keys=False), _Blocks(kv_starts, kv_len, are_keys=True)
            batches.append((q_len, kv_len, blocks))
    return tuple(batches)


@functools.lru_cache(maxsize=PLANS_KEPT)
def _plan(part: Part) -> tuple[tuple[_Place, _Place], ...]:
    """The kernel calls of a part: the positions of each call's queries and keys."""
    q_starts, kv_starts = (accumulate(lens, initial=0) for lens in (part.q_lens, part.kv_lens))
    entries = map(_Entry, q_starts, part.q_lens, kv_starts, part.kv_lens)
    calls: list[tuple[_Place, _Place]] = []
    short: list[_Entry] = []
    for _, same in groupby(entries, key=lambda entry: (entry.q_len, entry.kv_len)):
        run = list(same)
        if len(run) * run[0].q_len < MIN_VIEW_ROWS:
            short += run
        else:
            calls.append(_views(run))
    for batch in _similar(short, part.causal):
        calls.append(_views(batch) if len(batch) == 1 else _gathered(batch))
    return tuple(calls)


def _similar(entries: Iterable[_Entry], causal: bool) -> Iterator[list[_Entry]]:
    """Batches of entries of similar length; non-causal ones also have equally many keys."""
    batch: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: (0 if causal else entry.kv_len, entry.q_len), reverse=True):
        longest = batch[0] if batch else entry
        is_full = (len(batch) + 1) * longest.q_len > MAX_BATCH_ROWS
        is_similar = entry.q_len >= LENGTH_RATIO * longest.q_len - LENGTH_SLACK
        if is_full or not is_similar or not (causal or entry.kv_len == longest.kv_len):
            yield batch
            batch = []
        batch.append(entry)
    if batch:
        yield batch


def _views(run: Sequence[_Entry]) -> tuple[_View, _View]:
    first = run[0]
    return _View(first.q_start, len(run), first.q_len), _View(first.kv_start, len(run), first.kv_len)


def _gathered(batch: Sequence[_Entry]) -> tuple[_Gathered, _Gathered]:
    q_starts, q_lens, kv_starts, kv_lens = zip(*batch, strict=True)
    queries = _Gathered(q_starts, q_lens)
    return queries, queries if (kv_starts, kv_lens) == (q_starts, q_lens) else _Gathered(kv_starts, kv_lens)


def _summed(gradient_BLHD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Gradients of `num_heads` heads, summed over the copies of each head."""
    if gradient_BLHD.shape[2] == num_heads:
        return gradient_BLHD
    return torch.unflatten(gradient_BLHD, 2, (num_heads, -1)).sum(3)


def _widened(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _heads_first(*tensors_BLHD: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors_BLHD]
