"""Temporary files of one vLLM: in a directory of its own, which is removed at its end, or else by the next start.

vLLM leaves sockets, a rendezvous file and caches in TMPDIR, and, where its processes are killed, segments of shared
memory. Those are not in the directory; their names are recorded there while the processes have them mapped.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger("inference_service")

PREFIX: Final = "async-rl-vllm-"
SEGMENTS_FILE: Final = ".shared-memory"
SHARED: Final = "/dev/shm/"
SEGMENT: Final = re.compile(r"/dev/shm/(psm_|sem\.mp-)\w+")
"""What Python's `multiprocessing` makes, shared memory and semaphores: vLLM's processes exchange messages by both."""

MAX_PARENT_BYTES: Final = 45
"""A socket's path has at most 107 bytes: this directory's name takes 23, and that of vLLM's sockets 37."""


class Scratch:
    """A new directory as a context, locked until it is left or this process ends, however it ends.

    Directories that processes of this user have left under the same parent are removed first.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Args:
        environment: whose TMPDIR is the parent, unless its name is too long for sockets.
        """
        parent = Path(environment.get("TMPDIR") or tempfile.gettempdir()).absolute()
        if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        self.path, self._lock = _make(parent)
        self._segments: set[str] = set()

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(self, *exception: object) -> None:
        """Removes the directory and the recorded segments: the processes have ended."""
        _remove(self.path)
        os.close(self._lock)

    def note_segments(self, pids: Iterable[int]) -> None:
        """Records the segments of shared memory that these processes have mapped."""
        new = _names({inode for pid in pids for inode in _mapped_inodes(pid)}) - self._segments
        if new:
            self._segments |= new
            with suppress(OSError), (self.path / SEGMENTS_FILE).open("a") as file:
                file.writelines(f"{segment}\n" for segment in sorted(new))


def _make(parent: Path) -> tuple[Path, int]:
    """A directory, and its descriptor with the lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        descriptor = os.open(path, os.O_RDONLY)
        # Where the file system has no locks, no directory counts as abandoned.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Another start may have found it before it was locked, and removed it.
        if path.exists():
            return path, descriptor
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            # Whoever may write to a shared directory can make one of this name, with any file in it.
            if path.lstat().st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                logger.info("removing what a killed vLLM left in %s", path)
                _remove(path)
            finally:
                os.close(descriptor)


def _remove(path: Path) -> None:
    with suppress(OSError):
        for segment in (path / SEGMENTS_FILE).read_text().splitlines():
            if SEGMENT.fullmatch(segment):
                Path(segment).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _mapped_inodes(pid: int) -> set[int]:
    """Of files in /dev/shm. Not their names: glibc maps a semaphore under another one, which it removes."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    columns = [line.split(maxsplit=5) for line in lines if SHARED in line]
    return {int(inode) for _, _, _, _, inode, *_ in columns}


def _names(inodes: set[int]) -> set[str]:
    found = set()
    with suppress(OSError):
        for path in Path(SHARED).iterdir() if inodes else ():
            with suppress(OSError):
                if SEGMENT.fullmatch(str(path)) and path.lstat().st_ino in inodes:
                    found.add(str(path))
    return found
