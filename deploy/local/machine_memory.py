"""Memory of this machine and of its devices, in bytes; for `async-rl check`, `doctor` and `init`, without torch."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.local.machine import output_of

MIB = 2**20

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

NPU_LINE = re.compile(r"HBM Capacity\(MB\)\s*:\s*(\d+)")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`total_bytes` that this process may use, a container's limit included; `available_bytes` of it now."""

    total_bytes: int
    available_bytes: int


def host_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> HostMemory:
    """The memory of this host, or of the container that this process is in."""
    text = meminfo.read_text() if meminfo.exists() else ""
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "MemTotal" in fields:
        total = fields["MemTotal"]
        available = fields.get("MemAvailable", total)
    else:
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _number_in(cgroup / "memory.max"), _number_in(cgroup / "memory.current")
    if limit is not None and limit < total:
        total, available = limit, min(available, max(0, limit - (used or 0)))
    return HostMemory(total, available)


def device_memory(kind: str, names: Sequence[str], run: Callable[[list[str]], str] = output_of) -> int | None:
    """The memory of the smallest of these devices of a kind, as `find_devices` names them.

    None on a CPU, where the tool does not say, and for a part of a GPU (MIG), which has less than the tool says.
    """
    if not names or any(name.startswith("MIG-") for name in names):
        return None
    if kind == "cuda":
        said = run(["nvidia-smi", "-i", ",".join(names), "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
        sizes = [int(line) for line in said.splitlines() if line.strip().isdigit()]
    elif kind == "npu":
        said = "".join(run(["npu-smi", "info", "-t", "memory", "-i", name]) for name in names)
        sizes = [int(size) for size in NPU_LINE.findall(said)]
    else:
        return None
    return min(sizes) * MIB if sizes else None


def _number_in(file: Path) -> int | None:
    """The number in a file of the kernel; None if there is none, or the file says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
