"""Only one run at a time in a run directory, as far as one host can tell at once; `lease.py` is for several hosts."""

import errno
import fcntl
from pathlib import Path
from typing import BinaryIO

from async_rl.errors import ConfigError, RunDirInUse
from async_rl.shared.locks.lease import read_term
from async_rl.shared.locks.process_identity import is_running

LOCK_FILE = ".lock"
LAUNCHER_LOCK_FILE = ".launcher.lock"


def make_run_dir(run_dir: Path) -> None:
    """Makes the directory of a run, if there is none.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir {str(run_dir)!r} cannot be made: {error.strerror}; name another directory"
        ) from error


def lock_run(run_dir: Path, name: str = LOCK_FILE) -> BinaryIO:
    """Locks `run_dir`, which exists, until the returned file is closed or this process ends in any way.

    If the file system has no locks, nothing is locked.

    Args:
        name: of the file that is locked: the trainer's, or the launcher's, which begins before and ends after it.

    Raises:
        RunDirInUse: another run holds it.
    """
    file = (run_dir / name).open("ab")
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
    """Raises RunDirInUse if another run currently holds `run_dir`, and may not be replaced."""
    if (run_dir / LOCK_FILE).exists() and not may_be_replaced(run_dir):
        lock_run(run_dir).close()


def may_be_replaced(run_dir: Path) -> bool:
    """Whether the lease of `run_dir` decides, though the directory be locked: its last holder is not known to run.

    A stopped process keeps its lock until it ends.
    """
    term = read_term(run_dir)
    return term is not None and not is_running(term.process)
