"""Rows of files that can only be read as a whole, and so stay in memory: a JSON array of objects, and CSV."""

import csv
import hashlib
import io
import json
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.rollouts.data.row import Row, without_nulls

Parse = Callable[[Path, str], list[Row]]
"""The path, for errors, and the text of a file -> its rows; raises ConfigError."""


class WholeFileRows:
    """Implements `Rows`; a place is the number of the row. The file is read once."""

    def __init__(self, path: Path, parse: Parse) -> None:
        self._path = path
        self._parse = parse

    def identity(self) -> str:
        return hashlib.sha256(self._content).hexdigest()

    def scan(self) -> Iterator[tuple[int, Row]]:
        return enumerate(self._rows)

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def row_at(self, place: int) -> Row:
        return self._rows[place]

    @cached_property
    def _content(self) -> bytes:
        return self._path.read_bytes()

    @cached_property
    def _rows(self) -> list[Row]:
        try:
            # Programs that make tables put a byte order mark before them.
            text = self._content.removeprefix(BOM_UTF8).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._path} is not UTF-8 text: {error}; save the file as UTF-8") from error
        return [without_nulls(row) for row in self._parse(self._path, text)]


def json_rows(path: Path) -> WholeFileRows:
    """Those of a JSON file with an array of objects."""
    return WholeFileRows(path, _rows_of_json)


def csv_rows(path: Path) -> WholeFileRows:
    """Those of a CSV file whose first line has the names of the columns; an empty cell is none."""
    return WholeFileRows(path, _rows_of_csv)


def _rows_of_json(path: Path, text: str) -> list[Row]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = "; a file of JSON lines is called .jsonl" if text.lstrip().startswith("{") else ""
        raise ConfigError(f"{path} is not JSON: {error}{lines}") from error
    if not isinstance(rows, list):
        raise ConfigError(f"{path} holds {type(rows).__name__}: expected one array of objects, a row each")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, row {number} is {type(row).__name__}: each row must be an object")
    return rows


def _rows_of_csv(path: Path, text: str) -> list[Row]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        names = next(reader, [])
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{path} has several columns {twice[0]!r}: rename or drop all but one")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise ConfigError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells, but the first line names {len(names)} "
                    "columns: put cells with commas or line ends into quotes"
                )
            rows.append({name: cell for name, cell in zip(names, cells, strict=True) if cell})
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num} is not CSV: {error}") from error
    return rows
