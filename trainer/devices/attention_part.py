"""The input of a device's attention kernel: sequences packed one after the other, each with its own rows."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from trainer.devices.host_copies import to_device


@dataclass(frozen=True)
class Part:
    """One attention call over sequences packed one after the other: entry i is `q_lens[i]` rows against `kv_lens[i]`.

    `causal` entries have at least as many keys as queries. The last row of an entry attends to its last key, and each
    row before it to one key less; with a `window` W, to the last W of these. Without `window` they have as many keys as
    queries. Rows of other entries attend to all keys. No length is 0.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    device: torch.device
    window: int | None = None

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
