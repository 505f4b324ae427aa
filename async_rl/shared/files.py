"""Writes files that other programs read or that a run resumes from: atomically, and flushed to the disk on return.

Called by all of async_rl and by the trainer's checkpoints. A failed write raises one error that names the file.
Weight snapshots are written elsewhere (`weights/snapshot.py`): streams in shared memory, unusable after a run.
"""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.errors import ProcessFailed, WriteFailed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EPERM, errno.ESTALE)
"""What a moment may mend: too many open files, a server of files that was away, a scanner that holds a file."""

PATIENCE_S = 2.0
PAUSE_S = 0.1


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically: a reader gets the complete new or the complete old file, after a crash too.

    Raises:
        WriteFailed: the old file, if there was one, is unchanged.
    """
    if not path.name:
        raise write_failed(path, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)))
    partial = path.with_name(f".{path.name}.partial")

    def write() -> None:
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            # The partial file itself may fill the disk.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    with named_write_errors(path):
        _patiently(write)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Appends lines, given without line ends, to a file, which is created if it does not exist.

    Only a process that is killed meanwhile leaves an incomplete line: a caller may go on after a failure, and its next
    line must not continue a broken one.

    Raises:
        WriteFailed: none of the lines was added, as far as the file system lets go of them again.
    """
    whole = memoryview("".join(f"{line}\n" for line in lines).encode())

    def append() -> None:
        # Without a buffer, which would be written once more when the file is closed.
        with path.open("ab", buffering=0) as file:
            size, left = file.tell(), whole
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                try:
                    file.truncate(size)
                except OSError:
                    raise _NotTakenBack(error.errno, error.strerror) from error
                raise

    with named_write_errors(path):
        _patiently(append)


class _NotTakenBack(OSError):
    """Lines may have been added in part: they must not be added again."""


def _patiently(write: Callable[[], None]) -> None:
    """Writes, again and again for a moment while it fails for a reason that may pass."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            write()
            return
        except OSError as error:
            if isinstance(error, _NotTakenBack) or error.errno not in PASSING or time.monotonic() > end_s:
                raise
        time.sleep(PAUSE_S)


def replace_directory(partial: Path, final: Path) -> None:
    """Renames a completely written directory to its final name, replacing the directory that has it.

    Raises:
        WriteFailed: the rename did not happen.
    """
    with named_write_errors(final):
        sync_directory(partial)
        remove_directory(final)
        partial.rename(final)
        sync_directory(final.parent)


def remove_directory(path: Path) -> None:
    """Removes a directory, if there is one; it is renamed first, so that it is never partly deleted under its name."""
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    if path.exists():
        path.rename(doomed)
        sync_directory(path.parent)
        shutil.rmtree(doomed)


def sync_directory(path: Path) -> None:
    """Waits until a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A folder for configs and logs; kept if a process failed, since the error names its log."""
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    is_named = False
    try:
        yield directory
    except ProcessFailed:
        is_named = True
        raise
    finally:
        if not is_named:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def named_write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError while writing `path` into `WriteFailed`."""
    try:
        yield
    except OSError as error:
        raise write_failed(path, error) from error


def write_failed(path: Path, error: BaseException) -> WriteFailed:
    """The error for a file or directory that cannot be written, with its remedy.

    A library may wrap the system's error in its own; a full disk is then only the likeliest reason.
    """
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    if not isinstance(error, OSError):
        remedy = f"check that its directory may be written to, and that there is room{_free(path)}"
    elif error.errno in FULL:
        remedy = f"make room there{_free(path)}; a run then goes on from its last checkpoint with run.resume = true"
    else:
        remedy = "check that its directory is there and may be written to"
    return WriteFailed(f"cannot write {str(path)!r}: {reason}; {remedy}")


def _free(path: Path) -> str:
    with suppress(OSError):
        return f" ({shutil.disk_usage(path.parent).free / 1e9:.2f} GB are free)"
    return ""
