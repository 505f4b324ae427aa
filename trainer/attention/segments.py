"""Which rows attend to which in a micro-batch, as the two parts that the kernels compute.

Shape legend: T fed rows, S key / value rows.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from trainer.devices.attention_part import Part
from trainer.devices.host_copies import to_device


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
    def prompts(self) -> tuple[range, ...]:
        """For each segment of the self part the key rows of its prompt; none for a prompt itself, and for padding."""
        found, cross = [], self.cross_part
        prompts = [range(*ends) for ends in pairwise(accumulate(cross.kv_lens, initial=0))] if cross else []
        ends = list(accumulate(cross.q_lens, initial=self.cross_q_start)) if cross else [0]
        for start in accumulate(self.self_part.q_lens[:-1], initial=0):
            of_group = sum(start >= end for end in ends) - 1
            found.append(prompts[of_group] if 0 <= of_group < len(prompts) else range(0))
        return tuple(found)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment and its prompt."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.self_part.q_lens, strict=True))

    @cached_property
    def _parts_by_window(self) -> dict[int, tuple[Part, torch.Tensor]]:
        return {}

    def windowed(self, window: int) -> tuple[Part, torch.Tensor]:
        """What a layer computes whose rows attend to the last `window` tokens only: one part, and the key rows that its
        keys are, int64. Of a prompt each response has the last rows, those that any of its own rows attends to."""
        made = self._parts_by_window
        if window not in made:
            made[window] = self._windowed(window)
        return made[window]

    def _windowed(self, window: int) -> tuple[Part, torch.Tensor]:
        own, rows, kv_lens = self.self_part, list[int](), []
        starts = accumulate(own.q_lens[:-1], initial=self.self_kv_start)
        for start, length, prompt in zip(starts, own.q_lens, self.prompts, strict=True):
            kept = prompt[max(0, len(prompt) - window + 1) :]
            rows += [*kept, *range(start, start + length)]
            kv_lens.append(len(kept) + length)
        part = Part(own.q_lens, tuple(kv_lens), True, own.device, window)
        return part, to_device(torch.tensor(rows, dtype=torch.int64), own.device)

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

    def dense_window_mask_TS(self, window: int) -> torch.Tensor:
        """As `dense_mask_TS`, where a row attends to tokens less than `window` positions before it only."""
        own = [
            len(prompt) + i
            for prompt, length in zip(self.prompts, self.self_part.q_lens, strict=True)
            for i in range(length)
        ]
        of_prompts = [i for length in self.cross_part.kv_lens for i in range(length)] if self.cross_part else []
        keys = [*of_prompts, *[0] * (self.self_kv_start - len(of_prompts))][: self.self_kv_start] + own
        rows_T, keys_S = (torch.tensor(positions, device=self.self_part.device) for positions in (own, keys))
        return self.dense_mask_TS & (rows_T[:, None] - keys_S < window)
