"""Which process it is, across hosts and restarts of hosts, and whether it has died or runs; for `lease.py`."""

import os
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")

_STATE = 0
_START_TIME = 19
"""Fields of /proc/PID/stat, counted after the command's name."""

_DEAD_STATES = ("Z", "X")
_STOPPED_STATES = ("T", "t")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`kernel` names the running system and its set of process numbers; `started` tells a process from a later one of
    the same number. Both are empty where the system does not tell them."""

    kernel: str
    pid: int
    started: str


def this_process() -> ProcessIdentity:
    """The calling process."""
    found = _stat(os.getpid())
    return ProcessIdentity(_kernel(), os.getpid(), found[_START_TIME] if found else "")


def has_died(process: ProcessIdentity) -> bool:
    """Whether it is known to have ended; False for a process of another host, and where that cannot be known."""
    if not process.kernel or process.kernel != _kernel():
        return False
    found = _stat(process.pid)
    return found is None or found[_STATE] in _DEAD_STATES or found[_START_TIME] != process.started


def is_running(process: ProcessIdentity) -> bool:
    """Whether it is known to be neither dead nor stopped by a signal; False for a process of another host."""
    if not process.kernel or process.kernel != _kernel() or has_died(process):
        return False
    found = _stat(process.pid)
    return found is not None and found[_STATE] not in _STOPPED_STATES


def _kernel() -> str:
    """Containers of one host share the boot id; each has its own process numbers."""
    try:
        return f"{BOOT_ID.read_text().strip()} {PID_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields after the command's name, which may have spaces and brackets; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
