"""Writes the files that others read, or that a run goes on from: whole or not at all, and on the disk on return.

Called by all of async_rl and by the trainer's checkpoints. What cannot be written raises one error that names the file.
Weight snapshots are written elsewhere (`weights/snapshot.py`): streams in shared memory, of no use after a run.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from async_rl.errors import WriteFailed

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file at once: a reader sees all of it or what was there before, after a crash too.

    Raises:
        WriteFailed: the old file, if there was one, is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    with named_write_errors(path):
        try:
            with partial.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            # The file may be what fills the disk.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Adds lines, given without their ends, to a file, and makes it where there is none.

    Raises:
        WriteFailed: the last line may be there in part.
    """
    with named_write_errors(path), path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def replace_directory(partial: Path, final: Path) -> None:
    """Gives a directory that is written to its end its name, in place of what has it.

    Raises:
        WriteFailed: it has not got it.
    """
    with named_write_errors(final):
        sync_directory(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_directory(final.parent)


def sync_directory(path: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named_write_errors(path: Path) -> Iterator[None]:
    """What the system says against writing `path` becomes `WriteFailed`."""
    try:
        yield
    except OSError as error:
        raise write_failed(path, error) from error


def write_failed(path: Path, error: BaseException) -> WriteFailed:
    """The error for a file or directory that cannot be written, with its remedy.

    A library may say in its own words that the system refused; the disk being full is then only the likeliest reason.
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
