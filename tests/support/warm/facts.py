"""`python -m tests.support.warm.facts [HOW]`: prints what a program can see of how it was started, then ends by HOW."""

import ctypes
import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)
PR_GET_PDEATHSIG = 2

VOLATILE = ("COLUMNS", "LINES", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "PYTEST_CURRENT_TEST")
"""The first two are set by readline, past `os.environ`, the next by `shared/cpu/products.py`, when it is imported."""


def facts() -> dict[str, object]:
    """Equal in two starts of the same command, but for the ids and the random number."""
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return {
        "argv": sys.argv,
        "original": sys.orig_argv,
        "shown": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "environment": {name: value for name, value in os.environ.items() if name not in VOLATILE},
        "directory": str(Path.cwd()),
        "path": sys.path,
        "name": __name__,
        "descriptors": [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)],
        "more descriptors": sorted(int(file.name) for file in Path("/proc/self/fd").iterdir())[3:-1],
        "parent": os.getppid(),
        "leads session": os.getsid(0) == os.getpid(),
        "leads group": os.getpgid(0) == os.getpid(),
        "signals": {number: str(signal.getsignal(number)) for number in signals},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": os.umask(0),
        "dies with parent": _death_signal(),
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "streams": [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "thread": [threading.get_native_id() == os.getpid(), threading.current_thread().name, threading.active_count()],
        "input": sys.stdin.read(),
    }


def _death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def end(how: str) -> None:
    if how == "code":
        sys.exit(7)
    if how == "text":
        sys.exit("a text")
    if how == "raises":
        raise KeyError("no such thing")
    if how == "interrupted":
        raise KeyboardInterrupt
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    of_one = {"pid": os.getpid(), "random": random.random(), "is warm": "torch" in sys.modules}
    print(json.dumps(of_one | facts()))
    end(sys.argv[1] if len(sys.argv) > 1 else "")
