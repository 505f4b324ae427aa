"""How Megatron's tensors are composed of Hugging Face tensors; `weight_map.py` says which is composed how.

Shape legend: E experts, A query heads, K key / value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Fusion(Protocol):
    """How one Megatron tensor is composed of Hugging Face tensors, or a rank's part of it from their parts."""

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Stacked:
    """The parts one after the other along dimension 0, in equal shares: gate and up; a single part is unchanged."""

    num_parts: int = 1

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        return list(merged.chunk(self.num_parts))


@dataclass(frozen=True, slots=True)
class Transposed:
    """One tensor of all experts, [E, inputs, outputs], as [E, outputs, inputs]; of biases, which have no inputs, the
    outputs are in both. `in_turn` outputs of as many kinds follow each other: gate, up, gate, up; in the model all of
    a kind stand together."""

    in_turn: int = 1

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (stacked,) = parts
        return _reversed(stacked.unflatten(-1, (-1, self.in_turn))).flatten(1, 2)

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        return [_reversed(merged.unflatten(1, (self.in_turn, -1))).flatten(-2).contiguous()]


def _reversed(of_experts: torch.Tensor) -> torch.Tensor:
    """With all dimensions after the first in the other order."""
    return of_experts.permute(0, *range(of_experts.dim() - 1, 0, -1))


@dataclass(frozen=True, slots=True)
class ByHead:
    """Parts that Megatron's tensor has head by head along dimension 0: per head its rows of each part in turn.

    `blocks` has the rows per head of each part, or of each block of a part that has the rows of one kind apart from
    those of the next. Tensor-parallel ranks divide the heads, so a rank's part has the same form with fewer heads.
    """

    blocks: tuple[tuple[int, ...], ...]

    @staticmethod
    def qkv(queries_per_kv: int, head_dim: int) -> "ByHead":
        """q [A * D, ...], k and v [K * D, ...]: per key / value head its query heads, then its key, then its value."""
        return ByHead(((queries_per_kv * head_dim,), (head_dim,), (head_dim,)))

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        heads = [
            block.unflatten(0, (-1, size))
            for part, sizes in zip(parts, self.blocks, strict=True)
            for size, block in zip(sizes, part.split(block_sizes(len(part), sizes)), strict=True)
        ]
        return torch.cat(heads, dim=1).flatten(0, 1)

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        sizes = [size for of_part in self.blocks for size in of_part]
        found = iter(merged.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1))
        parts = [[next(found).flatten(0, 1) for _ in of_part] for of_part in self.blocks]
        return [torch.cat(blocks) if len(blocks) > 1 else blocks[0] for blocks in parts]


def block_sizes(num_rows: int, blocks: Sequence[int]) -> list[int]:
    """Rows of each block of a tensor, whose rows per head are `blocks`."""
    return [num_rows // sum(blocks) * size for size in blocks]


@dataclass(frozen=True, slots=True)
class SlicedQKV:
    """A rank's rows of `ByHead.qkv`'s tensor where several ranks share a key / value head: an equal share of all rows,
    wherever it begins. Megatron gathers the ranks' products, and each takes the heads it needs; so every weight is on
    one rank, and its gradient whole.
    """

    queries_per_kv: int
    head_dim: int
    num_kv_heads: int
    rank: int
    num_ranks: int

    @property
    def rows(self) -> range:
        """Of the whole tensor, those of this rank."""
        share = self.num_kv_heads * (self.queries_per_kv + 2) * self.head_dim // self.num_ranks
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def parts(self) -> list[range]:
        """The rows of q, of k and of v that are among them; they follow each other in each."""
        group, heads = (self.queries_per_kv + 2) * self.head_dim, (0, self.queries_per_kv, self.queries_per_kv + 1)
        found = []
        for first_head, num_heads in zip(heads, (self.queries_per_kv, 1, 1), strict=True):
            first, size = first_head * self.head_dim, num_heads * self.head_dim
            start, stop = (
                row // group * size + min(max(row % group - first, 0), size)
                for row in (self.rows.start, self.rows.stop)
            )
            found.append(range(start, stop))
        return found

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        in_a_row = torch.cat(list(parts))
        merged = torch.empty_like(in_a_row)
        merged[torch.cat(self._places()).to(merged.device)] = in_a_row
        return merged

    def split(self, merged: torch.Tensor) -> list[torch.Tensor]:
        return [merged[places.to(merged.device)] for places in self._places()]

    def _places(self) -> list[torch.Tensor]:
        """Where the rows of q, of k and of v are in this rank's tensor."""
        heads = torch.tensor(self.rows) // self.head_dim % (self.queries_per_kv + 2)
        kinds = (heads - self.queries_per_kv).clamp(min=-1)
        return [(kinds == kind).nonzero()[:, 0] for kind in (-1, 0, 1)]
