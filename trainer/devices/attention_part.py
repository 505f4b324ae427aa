"""The input of a device's attention kernel: sequences packed one after the other, each with its own rows."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from trainer.devices.host_copies import to_device


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

    @property
    def cu_seqlens_q(self) -> torch.Tensor:
        """Where each entry's queries begin, and the end: int32 [entries + 1]."""
        return self._offsets[0]

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Where each entry's keys begin, and the end: int32 [entries + 1]."""
        return self._offsets[1]

    @cached_property
    def _offsets(self) -> torch.Tensor:
        """Both in one copy to the device."""
        rows = [[0, *accumulate(lens)] for lens in (self.q_lens, self.kv_lens)]
        return to_device(torch.tensor(rows, dtype=torch.int32), self.device)
