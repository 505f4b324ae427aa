"""Files that grow while they are read: only what is new is read, and a file that was cut is noticed; for `run_records`.

A run that resumes replaces its records by shorter ones, or a user copies others over them. Such a file has another
inode, or other bytes right before the place up to which it was read.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from async_rl.tracking.record_lines import record_of
from async_rl.tracking.rotation import Rotation

MARK_BYTES = 64
"""How many bytes before the place are compared; a record's line differs from others of its length within its end."""

Key = TypeVar("Key")


class FollowedFile:
    """The whole lines of one file, each once; a missing file is an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""

    def has_restarted(self) -> bool:
        """Whether what was read is no longer there; the next lines are then those from its beginning."""
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                file.seek(self._offset - len(self._mark))
                same = identity == self._identity and file.read(len(self._mark)) == self._mark
        except OSError:
            identity, same = None, self._offset == 0
        self._identity = identity
        if same or self._offset == 0:
            return False
        self.restart()
        return True

    def restart(self) -> None:
        """Lets the next lines be those from its beginning."""
        self._offset, self._mark, self._seen = 0, b"", None

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line with its end) of each line that is complete by now and was not read before."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    offset = self._offset
                    self._offset += len(line)
                    self._mark = line[-MARK_BYTES:]
                    yield offset, line
        except OSError:
            return

    def is_unchanged(self) -> bool:
        """Whether the file has the size and the time of change that it had at the last call: nothing needs be read."""
        try:
            stat = self.path.stat()
        except OSError:
            return self._offset == 0
        seen, self._seen = self._seen, (stat.st_size, stat.st_mtime_ns)
        return seen == self._seen


@dataclass(frozen=True, slots=True)
class Span(Generic[Key]):
    """Consecutive lines of a file that have the same key: the bytes from `start` to `end`."""

    path: Path
    key: Key
    start: int
    end: int

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows; fewer if the file has changed since."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.end - self.start)
        except OSError:
            return
        yield from (row for line in content.split(b"\n") if (row := record_of(line)) is not None)


@dataclass(slots=True)
class _Part(Generic[Key]):
    file: FollowedFile
    keys: list[tuple[Key, int, int]] = field(default_factory=list)


class FollowedRotation(Generic[Key]):
    """An index of rotated files: where the lines of each key are. Only the index is kept in memory.

    Args:
        key_of: the key of a line; None leaves the line out.
    """

    def __init__(self, kind: Rotation, run_dir: Path, key_of: Callable[[bytes], Key | None]) -> None:
        self._kind = kind
        self._run_dir = run_dir
        self._key_of = key_of
        self._parts: dict[tuple[int, int], _Part[Key]] = {}

    def follow(self) -> None:
        """Reads what is new in all files. A file keeps its index when it is renamed."""
        found: dict[tuple[int, int], _Part[Key]] = {}
        for path in self._kind.parts(self._run_dir):
            try:
                stat = path.stat()
            except OSError:
                continue
            part = self._parts.get((stat.st_dev, stat.st_ino)) or _Part(FollowedFile(path))
            part.file.path = path
            found[stat.st_dev, stat.st_ino] = part
        self._parts = found
        for part in found.values():
            self._follow_part(part)

    def _follow_part(self, part: _Part[Key]) -> None:
        if part.file.is_unchanged():
            return
        if part.file.has_restarted():
            part.keys.clear()
        for offset, line in part.file.new_lines():
            key = self._key_of(line)
            if key is None:
                continue
            end = offset + len(line)
            if part.keys and part.keys[-1][0] == key and part.keys[-1][2] == offset:
                part.keys[-1] = (key, part.keys[-1][1], end)
            else:
                part.keys.append((key, offset, end))

    def spans(self) -> Iterator[Span[Key]]:
        """In the order of the lines, oldest first."""
        for part in self._parts.values():
            yield from (Span(part.file.path, *key) for key in part.keys)


_ITERATION = re.compile(rb'\{"iteration": ?(\d{1,15}),')


def iteration_of(line: bytes) -> int | None:
    """The iteration of a line; as most begin with it, mostly without parsing it."""
    if match := _ITERATION.match(line):
        return int(match[1])
    record = record_of(line)
    return record["iteration"] if record is not None and has_iteration(record) else None


def has_iteration(record: Mapping[str, Any]) -> bool:
    """Whether the record names its iteration, as all records of a run do."""
    iteration = record.get("iteration")
    return isinstance(iteration, int) and not isinstance(iteration, bool)
