"""What starts an isolated interpreter: the interface of `bubblewrap.py` and `sandlock.py`."""

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_rl.parts.sandbox.limits import Limits

PYTHON = Path(os.path.realpath(sys.executable))
"""The interpreter itself, not the link of a virtual environment: programs have the standard library."""

PREFIX = Path(sys.base_prefix).resolve()

FLAGS = ("-X", "utf8", "-P", "-s", "-S")
"""No site packages: importing `site` takes longer than most programs."""

FIRST_UID, NUM_UIDS = 0x70000000, 2**24
"""User ids that no system hands out (systemd's UIDs-GIDs.md)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that runs its further arguments isolated.

    Attributes:
        python: the interpreter, as it is called inside.
        scratch: where programs write: a file system in memory, as it is called inside, or else a directory on a disk.
        uid: the user that a program started as root becomes inside: one of its own, so that its processes are counted
            alone; None where it is somebody else already.
        ends_by: the signal with which the command ends all that it started.
        filter: a seccomp filter that the program installs itself, where the command does not.
        counts_processes: the backend limits their number by itself.
    """

    command: tuple[str, ...]
    python: str
    scratch: str
    in_memory: bool
    fds: tuple[int, ...] = ()
    uid: int | None = None
    ends_by: signal.Signals = signal.SIGKILL
    filter: bytes | None = None
    counts_processes: bool = False


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def launch(self, limits: Limits) -> AbstractContextManager[Launch]:
        """The launch of one sandbox; its files are open until the process has been started."""
        ...


def own_uid() -> int:
    return FIRST_UID + secrets.randbelow(NUM_UIDS)


@contextmanager
def readable(data: bytes) -> Iterator[int]:
    """A file descriptor with `data`, which fits the buffer of a pipe."""
    source, sink = os.pipe()
    try:
        os.write(sink, data)
        os.close(sink)
        yield source
    finally:
        os.close(source)
