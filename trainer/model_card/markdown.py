"""Texts of users and of records as Markdown that shows them as they are: nothing in them is markup."""

import re
from collections.abc import Iterable, Sequence

from async_rl.shared.programs.error_text import one_line

_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$^=-])")
_BAR, _ESCAPED_BAR = re.compile(r"(?<!\\)\|"), r"\\|"
_FENCE = re.compile(r"`{3,}")

NOTHING = "–"
"""In a cell without a value."""


def plain(text: str) -> str:
    """Text on one line, every sign of markup escaped."""
    return _MARKUP.sub(r"\\\1", _one_line(text))


def code(text: str) -> str:
    """Text on one line in a code span that no backtick in it can end."""
    text = _one_line(text)
    if not text:
        return NOTHING
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    mark = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{mark}{pad}{text}{pad}{mark}"


def fenced(text: str, language: str) -> str:
    """A block of code, in a fence longer than any inside."""
    longest = max((len(run) for run in _FENCE.findall(text)), default=2)
    mark = "`" * (longest + 1)
    return f"{mark}{language}\n{text.rstrip()}\n{mark}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, of_numbers: bool = True) -> str:
    """A table of cells that are Markdown already; `of_numbers` aligns all columns but the first at the right."""
    lines = [header, ["---"] + ["---:" if of_numbers else "---"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(_BAR.sub(_ESCAPED_BAR, cell) for cell in cells)} |" for cells in lines)


def figure(value: float | None) -> str:
    """A number with four digits."""
    return NOTHING if value is None else f"{value:.4g}"


def _one_line(text: str) -> str:
    return " ".join(one_line(text).split())
