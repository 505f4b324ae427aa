"""The weight snapshots of one run in a directory: the current and the previous one; abandoned ones are removed.

The previous one stays because an instance may still be reading it when the next publish begins.
"""

import fcntl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from async_rl.errors import ConfigError
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.snapshot import SnapshotWriter

SUFFIX = ".safetensors"
LOCK_SUFFIX = ".lock"


class SnapshotStore:
    """The snapshots of one run in `directory`, which other runs may share.

    While a store is open it holds the lock of a file there, which the system releases when the process ends. So a later
    store recognises the snapshots of a killed run and removes them: they must not fill up shared memory.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        """Creates the directory and removes the snapshots of runs that have ended.

        Raises:
            ConfigError: it cannot be created or written to.
        """
        self._directory = directory.absolute()
        self._run_id = run_id
        self._kept: list[Path] = []
        self._writer: SnapshotWriter | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            self._lock = (self._directory / f".{run_id}{LOCK_SUFFIX}").open("wb")
        except OSError as error:
            raise ConfigError(
                f"cannot use publish.snapshot_dir {str(directory)!r}: {error}; name a directory that can be made and "
                "written to"
            ) from error
        _try_lock(self._lock)

    def begin(self, version: str, specs: Sequence[TensorSpec]) -> SnapshotWriter:
        """Starts the snapshot of `version`, replacing an unfinished one; removes the one before the previous."""
        self._discard()
        while len(self._kept) > 1:
            self._kept.pop(0).unlink(missing_ok=True)
        self._writer = SnapshotWriter(self._directory / f"{self._run_id}.{version}{SUFFIX}", specs)
        return self._writer

    def commit(self) -> Path:
        """Finishes the snapshot that was begun last: it becomes the current one."""
        assert self._writer is not None, "no snapshot was begun"
        path = self._writer.commit()
        self._writer = None
        if path not in self._kept:  # a publish that lost every instance begins its version again
            self._kept.append(path)
        return path

    def close(self) -> None:
        """Removes every snapshot of the run; instances can still read those they have open. May be called again."""
        self._discard()
        self._remove_run(self._run_id)
        self._kept.clear()
        self._lock.close()

    def _discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    def _remove_abandoned(self) -> None:
        for path in self._directory.glob(f".*{LOCK_SUFFIX}"):
            # Another user's, or being removed by another store.
            with suppress(OSError), path.open("r+b") as lock:
                if _try_lock(lock):
                    self._remove_run(path.name.removeprefix(".").removesuffix(LOCK_SUFFIX))

    def _remove_run(self, run_id: str) -> None:
        for path in self._directory.iterdir():
            if path.name.removeprefix(".").startswith(f"{run_id}.") and path.suffix == SUFFIX:
                path.unlink(missing_ok=True)
        (self._directory / f".{run_id}{LOCK_SUFFIX}").unlink(missing_ok=True)


def _try_lock(file: BinaryIO) -> bool:
    """False if another process holds it, or the file system has no locks: then no run counts as ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
