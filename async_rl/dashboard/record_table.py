"""One record per iteration as columns of numbers, for `run_records`: what curves are drawn from."""

import math
from collections.abc import Mapping
from typing import Any

MAX_COLUMNS = 500
"""Columns beyond are left out: a record has about 50, and a few for each part of a mixture or a reward."""


class RecordTable:
    """Columns of the numbers of `metrics.jsonl`, one entry per iteration; None where a record has no such number."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.columns: dict[str, list[float | None]] = {}
        self.hours: list[float] = []
        """When each iteration ended, in hours that iterations took."""

    def clear(self) -> None:
        self._cut(0)
        self.columns.clear()

    def add(self, record: Mapping[str, Any]) -> bool:
        """Adds a record; returns False if it replaces entries: iterations from its own on were trained again."""
        iteration = record["iteration"]
        num_kept = len(self.iterations)
        while num_kept and self.iterations[num_kept - 1] >= iteration:
            num_kept -= 1
        is_next = num_kept == len(self.iterations)
        if not is_next:
            self._cut(num_kept)
        self.iterations.append(iteration)
        seconds = number_of(record.get("seconds")) or 0.0
        self.hours.append((self.hours[-1] if self.hours else 0.0) + seconds / 3600)
        for name, value in record.items():
            if name not in self.columns and number_of(value) is not None and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = [None] * num_kept
        for name, column in self.columns.items():
            column.append(number_of(record.get(name)))
        return is_next

    def since(self, first: int) -> dict[str, Any]:
        """The entries from number `first` on, as JSON."""
        columns = {name: column[first:] for name, column in self.columns.items() if name != "iteration"}
        return {"first": first, "iterations": self.iterations[first:], "hours": self.hours[first:], "columns": columns}

    def row(self, iteration: int) -> dict[str, float | None]:
        """The numbers of one iteration; empty if it has no record."""
        try:
            number = self.iterations.index(iteration)
        except ValueError:
            return {}
        return {name: column[number] for name, column in self.columns.items()}

    def _cut(self, num_kept: int) -> None:
        del self.iterations[num_kept:]
        del self.hours[num_kept:]
        for column in self.columns.values():
            del column[num_kept:]


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else, `true` and numbers beyond the range of floats included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None
