"""What the processes of a sandbox use, seen from the outside: no program inside can prevent it."""

import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
BLOCK = 512
"""Of `st_blocks`, whatever the file system's own are."""

FRESH_S = 0.05
"""Sandboxes that look at about the same time share one reading of the system's processes."""

COUNTED = ("RssAnon", "VmSwap", "VmPTE")
"""Lines of /proc/PID/status: a process's own pages, also those swapped out, and their tables. Files in memory are
counted with their file system; other shared memory cannot be made (`seccomp.py`)."""

PIPE_BYTES = 16 * PAGE
"""The buffer of a pipe, which a program cannot enlarge."""

USUAL_SEND_BYTES = 212_992
"""The buffer of a socket where the system does not say its own."""

Held = Mapping[tuple[int, int], int]
"""The most that each pipe and socket may hold, by device and inode: processes share them."""

_children: dict[int, list[int]] = {}
_read_at = -FRESH_S


@dataclass(frozen=True, slots=True)
class Usage:
    """`memory_bytes` with the files'."""

    memory_bytes: int = 0
    file_bytes: int = 0
    num_files: int = 0


def usage_of(pid: int, scratch: str, max_files: int, *, in_memory: bool) -> Usage:
    """What a process and its descendants use now; nothing of what has ended.

    A pipe or a socket counts with what it may hold: what it does hold cannot be seen.

    Args:
        scratch: where their files are: `in_memory` a file system, as they see it, else a directory of ours.
        max_files: the number beyond which the files of a directory are not counted on.
    """
    children = _processes()
    memory = 0
    held: dict[tuple[int, int], int] = {}
    waiting = children.get(pid, [])[:]
    if in_memory:
        file_bytes, num_files = _files(waiting[0], scratch) if waiting else (0, 0)
    else:
        file_bytes, num_files = _tree(scratch, max_files)
    while waiting:
        descendant = waiting.pop()
        waiting += children.get(descendant, [])
        # It may end meanwhile.
        with suppress(OSError):
            memory += _own_bytes((PROC / str(descendant) / "status").read_text().splitlines())
            held |= _held(descendant, deleted=not in_memory)
    return Usage(memory + file_bytes + sum(held.values()), file_bytes, num_files)


def _own_bytes(status: Iterable[str]) -> int:
    fields = (line.partition(":") for line in status)
    return sum(int(value.split()[0]) * 1024 for name, _, value in fields if name in COUNTED)


def _held(pid: int, *, deleted: bool) -> Held:
    """By its descriptors, with `deleted` files; where we may not look, each is taken for a socket of its own."""
    descriptors = PROC / str(pid) / "fd"
    try:
        links = list(descriptors.iterdir())
    except PermissionError:
        # Their number, or 0 before Linux 6.2.
        return {(-pid, number): send_bytes() for number in range(descriptors.stat().st_size)}
    found: dict[tuple[int, int], int] = {}
    for link in links:
        with suppress(OSError):
            opened = link.stat()
            if stat.S_ISSOCK(opened.st_mode):
                num_bytes = send_bytes()
            elif stat.S_ISFIFO(opened.st_mode):
                num_bytes = PIPE_BYTES
            else:
                num_bytes = _on_disk(opened) if deleted and opened.st_nlink == 0 else 0
            found[opened.st_dev, opened.st_ino] = num_bytes
    return found


def _on_disk(file: os.stat_result) -> int:
    return file.st_blocks * BLOCK if stat.S_ISREG(file.st_mode) else 0


@cache
def send_bytes() -> int:
    """The buffer of a socket, which a program cannot enlarge."""
    try:
        return int((PROC / "sys/net/core/wmem_default").read_text())
    except (OSError, ValueError):
        return USUAL_SEND_BYTES


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


def _tree(path: str, max_files: int) -> tuple[int, int]:
    """Of a directory that a program may change meanwhile, or make so that we may not read it: then it has too many."""
    file_bytes = num_files = 0
    waiting = [path]
    while waiting and num_files <= max_files:
        try:
            for entry in os.scandir(waiting.pop()):
                num_files += 1
                if num_files > max_files:
                    break
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    file_bytes += _on_disk(found)
                    if stat.S_ISDIR(found.st_mode):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return file_bytes, max_files + 1
    return file_bytes, num_files
