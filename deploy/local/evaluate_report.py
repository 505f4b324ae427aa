"""What `async-rl eval` shows and writes: a table, and one JSON object; for `evaluate.py`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from async_rl.errors import ConfigError
from async_rl.files import write_file

Line = Mapping[str, Any]
"""A line of the program's `results.jsonl` or `responses.jsonl`; see `async_rl/evaluation/output.py`."""

NOT_SHOWN = ("set", "intervals", "sources", "started_unix_s")
"""Keys that are no row of the table: columns, what stands beside another figure, and what only programs read."""


def show_results(console: Console, results: Sequence[Line]) -> None:
    """One column per set and per source of a set, one row per metric, with its confidence interval if it has one."""
    columns = [column for result in results for column in _columns(result)]
    table = Table(title="evaluation, with 95% confidence intervals", title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(escape(name), justify="right")
    keys = dict.fromkeys(key for _, line in columns for key in line if key not in NOT_SHOWN)
    for key in keys:
        table.add_row(escape(key), *(_cell(line, key) for _, line in columns))
    console.print(table)


def _columns(result: Line) -> Iterator[tuple[str, Line]]:
    yield result["set"], result
    for name, source in result.get("sources", {}).items():
        yield f"{result['set']}: {name or 'other'}", source


def _cell(line: Line, key: str) -> str:
    value = line.get(key, "")
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    if interval := line.get("intervals", {}).get(key):
        shown += " [{:.3g}, {:.3g}]".format(*interval)
    return escape(shown)


def results_json(model: str, results: Sequence[Line]) -> str:
    """The results as one JSON object, on one line."""
    return json.dumps({"model": model, "sets": list(results)})


def require_writable(path: Path) -> None:
    """Checks, before an evaluation that may take hours, that its results can be written.

    Raises:
        ConfigError: they cannot.
    """
    if path.is_dir():
        raise ConfigError(f"--out {str(path)!r} is a directory: name a file in it")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {str(path)!r}: its directory is not there or cannot be written to: name another one")


def write_results(path: Path, model: str, results: Sequence[Line]) -> None:
    """Writes the JSON object; what was in the file before is replaced."""
    write_file(path, results_json(model, results) + "\n")
