"""A process that ends with the one that started it."""

import ctypes
import logging
import signal
import sys

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def end_with_parent() -> None:
    """Has Linux kill this process when its parent dies without ending it, as by `kill -9`; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("this process would outlive its parent: prctl failed with error %d", ctypes.get_errno())
