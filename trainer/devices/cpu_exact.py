"""The CPU with the operations of `async_rl.shared.cpu.exact`: what `train.exact` chooses.

Forward is computed by them; backward is that of the ordinary kernels, on the same values. Entries of attention are
gathered into batches of one width (see `exact.key_width`), so each is computed as if it were alone.

Shape legend: M query rows, S key / value rows, H query heads, K key / value heads, D head dimension, B entries of one
kernel call, L rows of each.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from async_rl.shared.cpu import exact
from async_rl.shared.cpu.reproducible import use_reproducible_products
from trainer.devices import cpu
from trainer.devices.attention_part import Part
from trainer.devices.cpu import BACKEND, DEVICE, MODEL_OPTIONS
from trainer.devices.cpu_attention import MAX_BATCH_ROWS, PLANS_KEPT, CPUAttention
from trainer.devices.cpu_ops import exact_linear
from trainer.devices.layer_ops import LayerOps


class ExactAttention(CPUAttention):
    """The kernel of `trainer.devices.AttentionKernel`, for float32; backward is inherited."""

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_MHD = torch.empty_like(query_MHD, memory_format=torch.contiguous_format)
        lse_MH = query_MHD.new_empty(query_MHD.shape[:2])
        for call in _plan(part):
            query, key, value = (
                rows.index_select(0, taken.flatten()).unflatten(0, taken.shape).transpose(1, 2)
                for rows, taken in ((query_MHD, call.q_BL), (key_SKD, call.kv_BL), (value_SKD, call.kv_BL))
            )
            if part.causal:
                out, lse = exact.attend_from(query, key, value, 0, scale)
            else:
                out, lse = exact.attend(query, key, value, call.bias, scale)
            for rows, batched in ((out_MHD, out), (lse_MH, lse)):
                rows.index_copy_(0, call.rows, batched.transpose(1, 2).flatten(0, 1).index_select(0, call.cells))
        return out_MHD, lse_MH.T


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call: the rows of its queries and keys, shorter entries padded with their last row.

    `cells` are those of its queries that are no padding, and `rows` where they belong. `bias`, [B, 1, 1, L], excludes
    the keys that are padding.
    """

    q_BL: torch.Tensor
    kv_BL: torch.Tensor
    rows: torch.Tensor
    cells: torch.Tensor
    bias: torch.Tensor | None


@functools.lru_cache(maxsize=PLANS_KEPT)
def _plan(part: Part) -> tuple[_Call, ...]:
    starts = zip(accumulate(part.q_lens, initial=0), accumulate(part.kv_lens, initial=0), strict=True)
    entries = [
        (*start, *lens) for start, lens in zip(starts, zip(part.q_lens, part.kv_lens, strict=True), strict=False)
    ]
    return tuple(_call(batch, part.causal) for batch in _batches(entries))


def _batches(entries: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Entries (first query, first key, queries, keys) of one width, and about as many queries."""
    batch: list[tuple[int, ...]] = []
    for entry in sorted(entries, key=lambda entry: (exact.key_width(entry[3]), entry[2]), reverse=True):
        if batch:
            _, _, longest, num_keys = batch[0]
            is_alike = exact.key_width(num_keys) == exact.key_width(entry[3]) and 4 * entry[2] >= 3 * longest - 8
            if not is_alike or (len(batch) + 1) * longest > MAX_BATCH_ROWS:
                yield batch
                batch = []
        batch.append(entry)
    yield batch


def _call(batch: Sequence[tuple[int, ...]], causal: bool) -> _Call:
    q_starts, kv_starts, q_lens, kv_lens = (torch.tensor(column) for column in zip(*batch, strict=True))
    width = exact.key_width(int(kv_lens.max()))
    q_BL, is_query_BL = _rows(q_starts, q_lens, int(q_lens.max()))
    kv_BL, is_key_BL = _rows(kv_starts, kv_lens, width)
    bias = None
    if not causal and not is_key_BL.all():
        bias = torch.zeros(is_key_BL.shape).masked_fill_(~is_key_BL, exact.MASKED)[:, None, None]
    cells = is_query_BL.flatten().nonzero()[:, 0]
    return _Call(q_BL, kv_BL, q_BL.flatten()[cells], cells, bias)


def _rows(starts: torch.Tensor, lengths: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [B, longest] of entries, and which of them are no padding."""
    steps = torch.arange(longest)
    return starts[:, None] + torch.minimum(steps, lengths[:, None] - 1), steps < lengths[:, None]


__all__ = ["ATTENTION", "BACKEND", "DEVICE", "LAYER_OPS", "MODEL_OPTIONS", "prepare"]

LAYER_OPS = LayerOps(
    rms_norm=exact.rms_norm,
    linear=exact_linear,
    matmul=exact.matmul,
    log_normalizer=exact.log_normalizer_of,
    swiglu=exact.swiglu,
    merge=exact.merge,
    exact=True,
)
ATTENTION = ExactAttention()


def prepare() -> None:
    """As `cpu.prepare`.

    Raises:
        ConfigError: this processor's products are not those that exact mode needs.
    """
    use_reproducible_products()
    cpu.prepare()
