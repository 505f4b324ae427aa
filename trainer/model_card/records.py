"""The records that a model card is made of: the lines of the iterations that an exported checkpoint has trained.

Records may be missing, or damaged: what is not there is left out, and what cannot be read is counted, so that an export
never fails because of its card.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]

METRICS, LEDGER, EVALUATIONS = "metrics.jsonl", "ledger.jsonl", "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Lines of the iterations before `iteration`, the one that is trained next, in the order of iterations.

    Evaluations are those of weights that these iterations made; those of `iteration` are of the exported weights.
    `unreadable` has the number of lines, by file, that are no records.
    """

    iteration: int
    metrics: Sequence[Line]
    ledger: Sequence[Line]
    evaluations: Sequence[Line]
    unreadable: Mapping[str, int]

    @classmethod
    def read(cls, run_dir: Path, iteration: int) -> "RunRecords":
        unreadable: dict[str, int] = {}

        def lines(name: str, last: int) -> list[Line]:
            found, num_bad = _read(run_dir / name)
            if num_bad:
                unreadable[name] = num_bad
            kept = [line for line in found if 0 <= line["iteration"] <= last]
            return sorted(kept, key=lambda line: int(line["iteration"]))

        return cls(
            iteration=iteration,
            metrics=lines(METRICS, iteration - 1),
            ledger=lines(LEDGER, iteration - 1),
            evaluations=lines(EVALUATIONS, iteration),
            unreadable=unreadable,
        )


def number(line: Line, key: str) -> float | None:
    """A finite number of a record; None if it has none under this key."""
    value = line.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _read(path: Path) -> tuple[list[Line], int]:
    """The records of a file, and how many of its lines are none; the last one may still be written."""
    try:
        texts = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return [], 0
    records = [record for text in texts if (record := _record(text)) is not None]
    return records, len(texts) - len(records)


def _record(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    iteration = line.get("iteration") if isinstance(line, dict) else None
    return line if isinstance(iteration, int) and not isinstance(iteration, bool) else None
