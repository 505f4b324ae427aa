"""Lines of JSON in files of a bounded total size; `recorder` writes them, `records` cuts them when a run resumes.

New lines are added to `NAME.jsonl`. Before it exceeds its limit it is renamed to `NAME.1.jsonl`, the next time to
`NAME.2.jsonl`, and so on; only the newest of these are kept. A killed writer leaves at most one incomplete line, the
last of `NAME.jsonl`: a file is renamed only when it is complete, in one step.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.shared.files import named_write_errors


@dataclass(frozen=True, slots=True)
class Rotation:
    """A kind of rotated file in a run directory: `num_kept` files of `max_bytes` are kept beside the one in use.

    A single line that is longer than `max_bytes` has a file of its own.
    """

    name: str
    max_bytes: int
    num_kept: int

    def parts(self, run_dir: Path) -> list[Path]:
        """The existing files, oldest first."""
        in_use = run_dir / self.name
        return [*self._full(run_dir).values(), *([in_use] if in_use.exists() else [])]

    def append(self, run_dir: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds one line per row.

        Raises:
            WriteFailed: the last line may be incomplete.
        """
        path = run_dir / self.name
        with named_write_errors(path):
            self._append(path, rows)

    def _append(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        file = path.open("ab")
        try:
            size = file.tell()
            for row in rows:
                line = _line(row)
                if size and size + len(line) > self.max_bytes:
                    file.close()
                    self._rotate(path.parent)
                    file, size = path.open("ab"), 0
                file.write(line)
                size += len(line)
        finally:
            file.close()

    def _rotate(self, run_dir: Path) -> None:
        full = self._full(run_dir)
        newest = max(full, default=0) + 1
        (run_dir / self.name).rename(self._path(run_dir, newest))
        for number, path in full.items():
            if number <= newest - self.num_kept:
                path.unlink()

    def _full(self, run_dir: Path) -> dict[int, Path]:
        """The files that are no longer written, by number."""
        stem, suffix = self._stem_and_suffix
        pattern = re.compile(rf"{re.escape(stem)}\.([1-9][0-9]*){re.escape(suffix)}")
        found = (pattern.fullmatch(path.name) for path in run_dir.glob(f"{stem}.*{suffix}"))
        numbers = sorted(int(match[1]) for match in found if match)
        return {number: self._path(run_dir, number) for number in numbers}

    def _path(self, run_dir: Path, number: int) -> Path:
        stem, suffix = self._stem_and_suffix
        return run_dir / f"{stem}.{number}{suffix}"

    @property
    def _stem_and_suffix(self) -> tuple[str, str]:
        name = Path(self.name)
        return name.stem, name.suffix


TIMELINE = Rotation("timeline.jsonl", max_bytes=64 * 2**20, num_kept=4)
"""Room for more than 50 iterations of 8,192 groups, or 7,000 of 64: a row has about 600 bytes."""

SAMPLES = Rotation("samples.jsonl", max_bytes=16 * 2**20, num_kept=4)


def _line(row: Mapping[str, Any]) -> bytes:
    # Text stays readable. Half of a surrogate pair, which UTF-8 does not have, is written as its JSON escape.
    return _ENCODER.encode(row).encode("utf-8", "backslashreplace") + b"\n"


_ENCODER = json.JSONEncoder(ensure_ascii=False)
