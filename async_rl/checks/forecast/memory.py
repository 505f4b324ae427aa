"""The memory of one process, part by part; `async_rl.checks.forecast` fills it, and `async-rl check` shows it."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """`num_bytes` for one purpose; `reason` is how they were counted."""

    name: str
    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The peak of one process on one device, or on the host where it computes on CPUs.

    `resident` parts exist together, all the time; the first is the base of the process. Of `phases` one at a time
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
        """What stays on a device as long as the process lives: the first part."""
        return self.resident[0].num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory beside a device; 0 where the process computes on CPUs."""
        return sum(part.num_bytes for part in self.on_host)
