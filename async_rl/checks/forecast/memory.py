"""The memory of one process, part by part; `async_rl.checks.forecast` fills it, and `async-rl check` shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

MIB = 2**20

BASE, COMMUNICATORS, BUFFERS = "base of the process", "communicators", "weight buffers"
"""Names of parts that stay on a device as long as their process lives."""

COMMUNICATOR_BYTES = {"cpu": 0, "cuda": 300 * MIB, "npu": 400 * MIB}
"""Of one process in one group. nccl has for each of at most 32 channels buffers of 9.2 MiB (NCCL_BUFFSIZE and those of
its protocols LL128 and LL, by their sizes in its source); hccl has 2 x HCCL_BUFFSIZE, by its documentation."""

FRAGMENTATION = 0.05
"""Of all that a process has on a device: what its allocator holds and cannot use, an assumption."""

MESSAGE_BYTES = {"broadcast": 320 * MIB, "stages": 320 * MIB, "changes": 320 * MIB, "ipc": 64 * MIB}
"""Between devices, by `publish.transport`: `bucket_bytes_of` in `shared/weights/messages.py`, which needs torch; a test
compares them."""

IPC_BUFFER_BYTES = 64 * MIB
"""Of each of the main rank's two: `PIECE_BYTES` of `shared/weights/ipc.py`."""

FINGERPRINT_BYTES = 128 * MIB
"""While it is computed on a device: 64 MiB of small tensors in one, and blocks of 2^20 words times multipliers."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """`num_bytes` for one purpose; `reason` is how they were counted."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The peak of one process on one device, or on the host where it computes on CPUs.

    `resident` parts exist together, all the time. Of `phases` one at a time
    exists. On a device the largest counts. On a CPU they add up (`keeps_freed`): the process keeps what one phase freed
    (`shared/cpu/memory.py`), in pieces of a layer's size, and the next phase's tensors, of the embedding's size, do not
    fit into these. `on_host` is what the process keeps in the host's memory beside a device.
    """

    resident: tuple[MemoryPart, ...]
    phases: tuple[MemoryPart, ...]
    keeps_freed: bool
    on_host: tuple[MemoryPart, ...] = ()

    @property
    def counted(self) -> tuple[MemoryPart, ...]:
        """The parts that add up to the peak."""
        phases = self.phases if self.keeps_freed else (max(self.phases, key=lambda part: part.num_bytes),)
        return (*self.resident, *phases)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.counted)

    @property
    def base_bytes(self) -> int:
        """What stays on a device as long as the process lives, whoever has the rest."""
        return sum(part.num_bytes for part in self.resident if part.name in (BASE, COMMUNICATORS, BUFFERS))

    @property
    def host_bytes(self) -> int:
        """Host memory beside a device; 0 where the process computes on CPUs."""
        return sum(part.num_bytes for part in self.on_host)


def fragmentation(resident: Sequence[MemoryPart], phases: Sequence[MemoryPart]) -> MemoryPart:
    """What the allocator of a device needs beside these."""
    used = sum(part.num_bytes for part in resident) + max(part.num_bytes for part in phases)
    return MemoryPart("fragmentation", ceil(FRAGMENTATION * used), f"{FRAGMENTATION:.0%} of the rest, assumed")


def messages_bytes(message_bytes: int, number: int, num_bytes: int, largest_bytes: int) -> int:
    """Of so many messages between devices at once, for a model of `num_bytes`.

    Its largest tensor, which may be larger than a message, is one of them; there is no second such tensor near it.
    """
    usual = min(message_bytes, num_bytes)
    return max(usual, largest_bytes) + (number - 1) * usual
