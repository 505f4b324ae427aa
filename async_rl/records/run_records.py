"""The records in a run's directory as those read them that only look: commands, views, pages, launchers.

The trainer may be writing them, or have left them broken: a file is read on from where it was read, up to its last
whole line, and what is no record is left out, since a view of a run must not end it. The trainer names a broken record
when it resumes (`records`). A run that resumes replaces its records by shorter ones, or a user copies others over them.
Such a file has another inode, or other bytes right before the place up to which it was read.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from async_rl.errors import ConfigError
from async_rl.records.rotation import TIMELINE, Rotation

METRICS, LEDGER, EVALUATIONS = "metrics.jsonl", "ledger.jsonl", "evaluations.jsonl"
NOTICES = "logs/notices.jsonl"

MARK_BYTES = 64
"""How many bytes before the place are compared; a record's line differs from others of its length within its end."""

Record = Mapping[str, Any]
Key = TypeVar("Key")


class RecordFile:
    """The lines of one file, each once; a missing file is an empty one.

    `has_restarted` says of the last reading whether what was read before is no longer there: it began anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_restarted = False
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._mark = b""

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line with its end) of each line that is complete by now and was not read before.

        A file that cannot be read at the moment is tried again with the next call.
        """
        is_same = self._is_same()
        self.has_restarted = self._offset > 0 and not is_same
        if self.has_restarted:
            self._offset, self._mark = 0, b""
        return self._read_on()

    def new_records(self) -> Iterator[dict[str, Any]]:
        """The records among the new lines."""
        return (record for _, line in self.new_lines() if (record := record_of(line)) is not None)

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """The records among the new lines, from the last one on, each parsed when it is asked for."""
        lines = [line for _, line in self.new_lines()]
        return (record for line in reversed(lines) if (record := record_of(line)) is not None)

    def _is_same(self) -> bool:
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                before, self._identity = self._identity, (stat.st_dev, stat.st_ino)
                file.seek(self._offset - len(self._mark))
                return before == self._identity and file.read(len(self._mark)) == self._mark
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _read_on(self) -> Iterator[tuple[int, bytes]]:
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
    file: RecordFile
    keys: list[tuple[Key, int, int]] = field(default_factory=list)


class RecordIndex(Generic[Key]):
    """Rotated files, of which only where the lines of each key are is kept in memory.

    Args:
        key_of: the key of a line; None leaves the line out.
    """

    def __init__(self, kind: Rotation, run_dir: Path, key_of: Callable[[bytes], Key | None]) -> None:
        self._kind = kind
        self._run_dir = run_dir
        self._key_of = key_of
        self._parts: dict[tuple[int, int], _Part[Key]] = {}

    def spans(self) -> list[Span[Key]]:
        """In the order of the lines, oldest first; reads what is new. A file keeps its index when it is renamed."""
        found: dict[tuple[int, int], _Part[Key]] = {}
        for path in self._kind.parts(self._run_dir):
            try:
                stat = path.stat()
            except OSError:
                continue
            part = self._parts.get((stat.st_dev, stat.st_ino)) or _Part(RecordFile(path))
            part.file.path = path
            found[stat.st_dev, stat.st_ino] = part
            self._follow(part)
        self._parts = found
        return [Span(part.file.path, *key) for part in found.values() for key in part.keys]

    def _follow(self, part: _Part[Key]) -> None:
        lines = part.file.new_lines()
        if part.file.has_restarted:
            part.keys.clear()
        for offset, line in lines:
            key = self._key_of(line)
            if key is None:
                continue
            end = offset + len(line)
            if part.keys and part.keys[-1][0] == key and part.keys[-1][2] == offset:
                part.keys[-1] = (key, part.keys[-1][1], end)
            else:
                part.keys.append((key, offset, end))


class RunRecords:
    """The files of records in `run_dir`, which may have none yet, each followed by itself."""

    def __init__(self, run_dir: Path) -> None:
        self.metrics, self.ledger, self.evaluations, self.notices = (
            RecordFile(run_dir / name) for name in (METRICS, LEDGER, EVALUATIONS, NOTICES)
        )
        self.timeline = RecordIndex(TIMELINE, run_dir, iteration_of)

    def groups(self, first_iteration: int = 0) -> Iterator[dict[str, Any]]:
        """The rows of the timeline of an iteration and of later ones."""
        for span in self.timeline.spans():
            if span.key >= first_iteration:
                yield from span.rows()


def require_readable(run_dir: Path, names: Iterable[str]) -> None:
    """Checks what a user names before its records are read, where those that cannot be are left out.

    Raises:
        ConfigError: it is no directory, or a file of one of these names may not be read.
    """
    try:
        if not run_dir.is_dir():
            raise ConfigError(f"{str(run_dir)!r} is not a directory: name the run.dir of a run, such as runs/NAME")
        for name in names:
            if (run_dir / name).exists():
                (run_dir / name).open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or str(run_dir)!r} cannot be read: {error.strerror}; name the run.dir of a run, and use "
            "an account that may read its records"
        ) from error


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def object_in(file: Path) -> Record:
    """The object that a JSON file has; an empty one where the file is missing, or has something else."""
    try:
        return record_of(file.read_bytes()) or {}
    except OSError:
        return {}


_ITERATION = re.compile(rb'\{"iteration": ?(\d{1,15}),')


def iteration_of(line: bytes) -> int | None:
    """The iteration of a line; as most begin with it, mostly without parsing it."""
    if match := _ITERATION.match(line):
        return int(match[1])
    record = record_of(line)
    return record["iteration"] if record is not None and has_iteration(record) else None


MAX_ITERATION = 2**53
"""Beyond it a number is none in a page, and no run's."""


def has_iteration(record: Record) -> bool:
    """Whether the record names its iteration, as all records of a run do."""
    iteration = record.get("iteration")
    return isinstance(iteration, int) and not isinstance(iteration, bool) and 0 <= iteration < MAX_ITERATION


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else, `true` and numbers beyond the range of floats included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


_NUMBER = re.compile(r"([0-9]+)")


def natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    """A key that sorts instances as people count, `instance-2` before `instance-10`, with numbers of any length."""
    words = _NUMBER.split(name)
    numbers = [number.lstrip("0") for number in words[1::2]] + [""]
    return tuple((text, len(number), number) for text, number in zip(words[::2], numbers, strict=True))


FIGURE = re.compile(r"avg@|pass@|reward|response_tokens|truncated")
"""How the names of an evaluation's figures begin."""


def describe_evaluation(record: Record) -> str:
    """A line of `evaluations.jsonl` in words: its figures and what they cost; of an incomplete one, what to do."""
    head = f"evaluation at iteration {record.get('iteration')}, {record.get('set')}: "
    known = {name: value for name, each in record.items() if (value := number_of(each)) is not None}
    done, total, failed = (known.get(name, 0) for name in ("num_prompts", "total_prompts", "num_failed"))
    cost = f"{known.get('seconds', 0.0):.1f} s, training waited {known.get('delay_s', 0.0):.1f} s for it"
    if done >= total:
        figures = "".join(f"{name} {value:.3f}, " for name, value in known.items() if FIGURE.match(name))
        return f"{head}{figures}{done} of {total} prompts, {cost}"
    if failed:
        return f"{head}no figures: {failed} of {total} prompts failed, see the trainer's log; {cost}"
    return f"{head}NO FIGURES: {done} of {total} prompts were answered before training had to go on; {cost}"
