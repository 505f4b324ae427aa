"""Forks that make siblings: a child of the parent of the process that calls; for `interpreter.py`."""

import ctypes
import functools
import os
import signal
import struct
import threading
from pathlib import Path

CLONE_PARENT = 0x8000
CLONE_CHILD_CLEARTID = 0x200000
CLONE_CHILD_SETTID = 0x1000000
SYS_CLONE = 56
"""On x86-64."""

PR_SET_MM = 35
PR_SET_MM_MAP = 14


def fork_sibling() -> int:
    """As `os.fork`, but the child's parent is the parent of this process, which must have one thread.

    glibc keeps the id of a thread in its descriptor, where the kernel writes the child's (CLONE_CHILD_SETTID).
    """
    assert threading.active_count() == 1, threading.enumerate()
    libc = ctypes.PyDLL(None)
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    arguments = [ctypes.c_long(value) for value in (SYS_CLONE, flags, 0, 0, _address_of_thread_id(), 0)]
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(*arguments)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("clone failed: are there too many processes?")
    return pid


def _address_of_thread_id() -> int:
    """Where glibc keeps the id of this thread, the main one: in the first kilobyte of its descriptor."""
    pthread_self = ctypes.PyDLL(None).pthread_self
    pthread_self.restype = ctypes.c_void_p
    descriptor = pthread_self()
    numbers = struct.unpack("256i", ctypes.string_at(descriptor, 1024))
    # The first: the process id, equal to it, was kept behind it in older releases.
    return int(descriptor) + 4 * numbers.index(os.getpid())


def _process_status() -> list[int]:
    """The fields of /proc/self/stat as proc(5) counts them, from 1; 0 for the second and the third, which are texts."""
    text = Path("/proc/self/stat").read_bytes()
    return [0, os.getpid(), 0, 0, *map(int, text.rpartition(b")")[2].split()[1:])]


@functools.cache
def _place_of_command_line() -> tuple[int, int]:
    """Where it begins and ends, before it was changed for the first time: forks inherit the answer."""
    return _process_status()[48], _process_status()[49]


def set_command_line(words: list[str]) -> None:
    """Shows `words` as this process's command line in /proc; what is longer than the interpreter's own is cut."""
    fields = _process_status()
    start, end = _place_of_command_line()
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
    # Its length is a field of `struct prctl_mm_map`, see prctl(2). Where the kernel refuses that, empty words follow.
    libc = ctypes.PyDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    code_and_data = (fields[26], fields[27], fields[45], fields[46], fields[47], libc.sbrk(ctypes.c_long(0)))
    places = (*code_and_data, fields[28], start, start + len(line), fields[50], fields[51])
    memory_map = struct.pack("<12QIi", *places, 0, 0, -1)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, memory_map, ctypes.c_long(len(memory_map)), 0)
