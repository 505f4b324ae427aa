"""Which rows attend to which in a micro-batch, as the two parts that the kernels compute.

Shape legend: T fed rows, S key / value rows.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from trainer.devices.attention_part import Part


@dataclass(frozen=True)
class Segments:
    """Attention structure: every segment causally to itself, and the rows of a group's responses to their prompt.

    Self part: all T rows, against the key rows from `self_kv_start` on. Cross part: the rows from `cross_q_start` on,
    `sum(cross_part.q_lens)` of them, against the key rows from 0 on; None where no response row is fed.
    """

    self_part: Part
    cross_part: Part | None
    self_kv_start: int = 0
    cross_q_start: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.self_part.q_lens)

    @cached_property
    def dense_mask_TS(self) -> torch.Tensor:
        """bool [T, S], True where row (query) may attend to column (key): the reference; quadratic in memory."""
        num_kv = self.self_kv_start + self.num_rows
        mask_TS = torch.zeros(self.num_rows, num_kv, dtype=torch.bool, device=self.self_part.device)
        for start, end in pairwise([0, *accumulate(self.self_part.q_lens)]):
            keys = slice(self.self_kv_start + start, self.self_kv_start + end)
            mask_TS[start:end, keys] = torch.ones_like(mask_TS[start:end, keys]).tril()
        if self.cross_part is not None:
            q_ends = accumulate(self.cross_part.q_lens, initial=self.cross_q_start)
            kv_ends = accumulate(self.cross_part.kv_lens, initial=0)
            for q, kv in zip(pairwise(q_ends), pairwise(kv_ends), strict=True):
                mask_TS[slice(*q), slice(*kv)] = True
        return mask_TS
