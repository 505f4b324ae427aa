"""What a row of any source is, and how sources are read; implemented by `jsonl_rows`, `tabular_rows`, `task_rows`.

Rows of files come `without_nulls`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

Row = dict[str, Any]

TEXT_PARTS: Final = ("text", "input_text", "output_text")


class Rows(Protocol):
    """The rows of one source, in its order. A place is a number by which a source finds a row again.

    `scan` reads the source itself. `row_at` may need a copy of it that can be read in any order: `save` makes it in a
    directory, `load` opens it there, after which the directory may be removed.
    """

    def identity(self) -> str | None:
        """A digest of the contents; None of rows that are generated."""

    def scan(self) -> Iterator[tuple[int, Row]]:
        """Each row with its place.

        Raises:
            ConfigError: the source cannot be read or is malformed.
        """

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def row_at(self, place: int) -> Row: ...


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


def text_of(content: object) -> str | None:
    """What a chat message's content says: a text, or a list of parts of text; None if it is something else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    texts = [
        each.get("text") if isinstance(each, Mapping) and each.get("type") in TEXT_PARTS else each for each in content
    ]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
