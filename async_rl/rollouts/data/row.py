"""What a row of any source is, and how sources are read; implemented by `jsonl_rows`, `tabular_rows`, `task_rows`.

Rows of files come `without_nulls`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]


class Rows(Protocol):
    """The rows of one source, in its order. A place is a number by which a source finds a row again.

    `scan` reads the source itself. `at` may need a copy of it that can be read in any order: `keep` makes it in a
    directory, `take` opens it there, after which the directory may be removed.
    """

    def identity(self) -> str | None:
        """A digest of the contents; None of rows that are generated."""

    def scan(self) -> Iterator[tuple[int, Row]]:
        """Each row with its place.

        Raises:
            ConfigError: the source cannot be read or is malformed.
        """

    def keep(self, directory: Path) -> None: ...

    def take(self, directory: Path) -> None: ...

    def at(self, place: int) -> Row: ...


def without_nulls(row: Row) -> Row:
    """The row without keys whose value is null, at any depth; nulls in lists stay, since they have a place.

    A table has all keys of all rows, and null where a row had none: `{"a": 1}` and `{"a": 1, "b": null}` are the same
    there, so they are the same in every format.
    """
    return {key: _without_nulls(value) for key, value in row.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return without_nulls(value)
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def is_unicode(text: str) -> bool:
    """Whether it can be encoded; JSON may have halves of letters, such as "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
