"""One record per iteration as columns of numbers, for `run_data`: what curves are drawn from."""

from collections.abc import Mapping
from typing import Any

from async_rl.records.run_records import number_of

MAX_COLUMNS = 500
"""Columns beyond are left out: a record has about 50, and a few for each part of a mixture or a reward."""

MAX_SECONDS = 1e9
"""Of an iteration; hours must ascend, and their sum must be finite, whatever a record says."""

NO_CURVES = ("iteration", "iterations", "started_unix_s")
"""Numbers of a record that are no figures of its iteration."""

DETAILS = ("response_tokens_histogram", "spans")
"""What a record has of an iteration beside numbers: lists of lists."""

MAX_DETAILS = 1000
"""Entries of such a list; a histogram has about 20, and there are two spans for each step."""


class RecordTable:
    """Columns of the numbers of `metrics.jsonl`, one entry per iteration; None where a record has no such number."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.columns: dict[str, list[float | None]] = {}
        self.hours: list[float] = []
        """When each iteration ended, in hours that iterations took."""
        self._details: list[dict[str, list[list[Any]]]] = []

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
        seconds = min(MAX_SECONDS, max(0.0, number_of(record.get("seconds")) or 0.0))
        self.hours.append((self.hours[-1] if self.hours else 0.0) + seconds / 3600)
        for name, value in record.items():
            if name in NO_CURVES:
                continue
            if name not in self.columns and number_of(value) is not None and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = [None] * num_kept
        for name, column in self.columns.items():
            column.append(number_of(record.get(name)))
        self._details.append({name: _lists(record.get(name)) for name in DETAILS})
        return is_next

    def since(self, first: int) -> dict[str, Any]:
        """The entries from number `first` on, as JSON."""
        columns = {name: column[first:] for name, column in self.columns.items()}
        return {"first": first, "iterations": self.iterations[first:], "hours": self.hours[first:], "columns": columns}

    def row(self, iteration: int) -> dict[str, Any]:
        """The numbers and details of one iteration; empty if it has no record."""
        try:
            number = self.iterations.index(iteration)
        except ValueError:
            return {}
        return {name: column[number] for name, column in self.columns.items()} | self._details[number]

    def _cut(self, num_kept: int) -> None:
        del self.iterations[num_kept:]
        del self.hours[num_kept:]
        del self._details[num_kept:]
        for column in self.columns.values():
            del column[num_kept:]


def _lists(value: Any) -> list[list[Any]]:
    """The lists of texts and finite numbers in a list."""
    if not isinstance(value, list):
        return []
    rows = [row for row in value[:MAX_DETAILS] if isinstance(row, list) and len(row) <= MAX_DETAILS]
    return [row for row in rows if all(isinstance(cell, str) or number_of(cell) is not None for cell in row)]
