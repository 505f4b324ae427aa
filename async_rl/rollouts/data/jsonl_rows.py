"""Rows of a JSON lines file. They stay in the file: a place is the offset of a line."""

import hashlib
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from async_rl.errors import ConfigError
from async_rl.rollouts.data.row import Row, without_nulls


class JsonlRows:
    """Implements `Rows`. The file must not change while a run reads it; if another takes its name, it is still read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._state = 0, 0, 0
        self._digest: str | None = None

    def identity(self) -> str:
        self._digest = _digest(self._open())
        return self._digest

    def scan(self) -> Iterator[tuple[int, Row]]:
        place = 0
        lines = self._open()
        lines.seek(0)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield place, self._parse(line, number)
            place += len(line)

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None:
        self._require_unchanged()
        self._digest = self._digest or _digest(self._open())

    def row_at(self, place: int) -> Row:
        self._require_unchanged()
        file = self._open()
        file.seek(place)
        return self._parse(file.readline(), f"at byte {place}")

    def _open(self) -> BinaryIO:
        """One file for all that is read: another one may take its name meanwhile."""
        if self._file is None:
            self._file = self._path.open("rb")
            self._state = self._now(self._file)
        return self._file

    def _require_unchanged(self) -> None:
        file = self._open()
        now = self._now(file)
        if now == self._state:
            return
        # The last time is also that of a new name, or of other permissions.
        if self._digest is None or _digest(file) != self._digest:
            raise ConfigError(
                f"{self._path} has changed since the run began to read it: restore it, and resume the run; give a run "
                "with other prompts a file of its own"
            )
        self._state = now

    def _now(self, file: BinaryIO) -> tuple[int, int, int]:
        state = os.fstat(file.fileno())
        return state.st_size, state.st_mtime_ns, state.st_ctime_ns

    def _parse(self, line: bytes, number: int | str) -> Row:
        if line.startswith(BOM_UTF8):
            raise ConfigError(
                f"{self._path}, line {number} begins with a byte order mark: save the file as UTF-8 without one"
            )
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self._path}, line {number} is not UTF-8 text: {error}; save the file as UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self._path}, line {number} is not JSON: {error}; each line must be one object"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"{self._path}, line {number} is {type(row).__name__}: each line must be one JSON object")
        return without_nulls(row)


def _digest(file: BinaryIO) -> str:
    """Of what is in the file now, not in the reader's buffer."""
    digest = hashlib.sha256()
    place = 0
    while chunk := os.pread(file.fileno(), 2**20, place):
        digest.update(chunk)
        place += len(chunk)
    return digest.hexdigest()
