"""What a row of any source is, and how sources are read; implemented by `jsonl_rows`, `tabular_rows`, `task_rows`."""

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


def is_unicode(text: str) -> bool:
    """Whether it can be encoded; JSON may have halves of letters, such as "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
