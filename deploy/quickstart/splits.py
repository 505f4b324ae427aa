"""The rows of a quickstart's task, divided by purpose, and their files."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows by purpose; no row is in two of them."""

    held_out: list[Row]
    validation: list[Row]
    warm_start: list[Row]
    prompts: list[Row]

    @classmethod
    def of(cls, rows: Iterable[Row], sizes: Sequence[int], seed: int) -> "Splits":
        """Divides different rows at random into sets of these sizes, in the order of the fields."""
        left = list(rows)
        random.Random(seed).shuffle(left)
        sets: list[list[Row]] = []
        for size in sizes:
            assert len(left) >= size, f"the task's draws gave too few different rows for a set of {size}"
            sets.append(left[:size])
            left = left[size:]
        return cls(*sets)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows as JSONL, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]
