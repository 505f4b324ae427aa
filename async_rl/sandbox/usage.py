"""What the processes of a sandbox use, seen from the outside: no program inside can prevent it."""

import os
import time
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")

FRESH_S = 0.05
"""Sandboxes that look at about the same time share one reading of the system's processes."""

_children: dict[int, list[int]] = {}
_read_at = -FRESH_S


def bytes_used(pid: int, directory: str | None) -> tuple[int, int]:
    """Memory and files of a process and its descendants in bytes, and the number of files; 0 of what has ended.

    Args:
        directory: the file system in memory that holds their files, as they see it; None where there is none.
    """
    children = _processes()
    memory, file_bytes, num_files = 0, 0, 0
    waiting = children.get(pid, [])[:]
    if waiting and directory is not None:
        file_bytes, num_files = _files(waiting[0], directory)
    while waiting:
        descendant = waiting.pop()
        waiting += children.get(descendant, [])
        try:
            resident, shared = (PROC / str(descendant) / "statm").read_text().split()[1:3]
        except (OSError, ValueError):
            continue
        memory += (int(resident) - int(shared)) * PAGE
    return memory + file_bytes, num_files


def _processes() -> dict[int, list[int]]:
    """The children of every process. Not every kernel lists them under the process."""
    global _children, _read_at
    if time.monotonic() - _read_at > FRESH_S:
        _children = defaultdict(list)
        for process in PROC.iterdir():
            if process.name.isdecimal():
                try:
                    # pid (name, which may hold anything) state parent ...
                    parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    continue
                _children[parent].append(int(process.name))
        _read_at = time.monotonic()
    return _children


def _files(pid: int, directory: str) -> tuple[int, int]:
    try:
        found = os.statvfs(PROC / str(pid) / "root" / directory.lstrip("/"))
    except OSError:
        return 0, 0
    return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
