"""Only one run at a time in a run directory: two would mix their records and checkpoints."""

import errno
import fcntl
from pathlib import Path
from typing import BinaryIO

from async_rl.errors import RunDirInUse

LOCK_FILE = ".lock"


def lock_run(run_dir: Path) -> BinaryIO:
    """Locks `run_dir`, which exists, until the returned file is closed or this process ends in any way.

    If the file system has no locks, nothing is locked.

    Raises:
        RunDirInUse: another run holds it.
    """
    file = (run_dir / LOCK_FILE).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise RunDirInUse(
                f"run.dir {str(run_dir)!r} is in use by another run, or by one that is still saving: wait for its end, "
                "or name another directory"
            ) from error
    return file


def require_unlocked(run_dir: Path) -> None:
    """Raises RunDirInUse if another run currently holds `run_dir`."""
    if (run_dir / LOCK_FILE).exists():
        lock_run(run_dir).close()
