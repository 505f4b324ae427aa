"""The input of a device's attention kernel: sequences packed one after the other, each with its own rows."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Part:
    """One attention call over sequences packed one after the other: entry i is `q_lens[i]` rows against `kv_lens[i]`.

    `causal` entries have as many keys as queries, and row j of an entry attends to its keys 0 .. j; rows of other
    entries attend to all keys. No length is 0.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    device: torch.device

    @cached_property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Where each entry's queries begin, and the end: int32 [entries + 1]."""
        return self._offsets(self.q_lens)

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Where each entry's keys begin, and the end: int32 [entries + 1]."""
        return self._offsets(self.kv_lens)

    def _offsets(self, lens: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=self.device)
