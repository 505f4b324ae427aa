"""Keeps the memory that tensors gave back, for the tensors that come next.

By default glibc returns memory blocks above some megabytes to the system when they are freed. A layer of a model makes
and frees tensors of that size continually, and the system clears each page again at its first use: a sixth of a
training step. See mallopt(3).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt, from glibc's malloc.h."""

_ALL = 2**31 - 1
_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> None:
    """From now on this process keeps up to 2 GB of freed memory, and so stays near its peak; does nothing elsewhere."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # musl has none.
    if mallopt is not None:
        for parameter, value in ((_MMAP_THRESHOLD, _ALL), (_TRIM_THRESHOLD, _ALL), (_TOP_PAD, _PAD_BYTES)):
            mallopt(parameter, value)
