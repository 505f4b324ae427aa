"""From a row as its source has it to the row that rewards and rollouts get: columns under the names that the run uses.

All of a row's own columns stay. A name of `columns` is added, and replaces a column of that name; so does `source`, the
name of the part, in a mixture.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config.prompts_section import DIFFICULTY, MAX_STOPS
from async_rl.errors import ConfigError
from async_rl.rollouts.data.formats import recognise
from async_rl.rollouts.data.part import SourcePart
from async_rl.rollouts.data.row import Row, is_unicode

PROMPT = "prompt"
ANSWER = "answer"
SOURCE = "source"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How responses to one row's prompt end, besides the run's own settings; None is the run's."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_response_tokens: int | None = None


class RowColumns:
    """Maps the rows of one part; whether its format is a published one is decided by its first row.

    A format counts only where the config names no column of its own.
    """

    def __init__(self, part: SourcePart, first_row: Row) -> None:
        self._part = part
        is_plain = part.prompt_name == PROMPT and not {PROMPT, ANSWER} & part.columns.keys()
        self.format = recognise(first_row) if is_plain else None
        self._columns: Mapping[str, str] = {**(self.format.columns if self.format else {}), **part.columns}
        self._needs_answer = ANSWER in self._columns
        self._samples_by_row = bool(self._columns.keys() & {"stop", "stop_token_ids", "max_response_tokens"})
        self._of_part = RowSampling(part.stop, part.stop_token_ids, part.max_response_tokens)
        self.unused = {*self._columns} - {PROMPT, ANSWER, DIFFICULTY}
        """Names for which `checked` has seen no value yet."""

    def mapped(self, row: Row) -> Row:
        """The row under the names that the run uses."""
        if not self._columns and not self._part.name:
            return row
        found = {name: _look_up(row, column) for name, column in self._columns.items()}
        if self.format is not None:
            found[ANSWER] = self.format.answer(found[ANSWER])
        return {**row, **found, **({SOURCE: self._part.name} if self._part.name else {})}

    def checked(self, row: Row, number: int) -> Row:
        """The same, of a row that is read for the first time.

        Raises:
            ConfigError: it has no prompt or no difficulty, or what it says of sampling has no meaning.
        """
        mapped = self.mapped(row)
        column = self._columns.get(PROMPT, self._part.prompt_name)
        if mapped.get(self._part.prompt_name) is None:
            raise ConfigError(
                f"prompts.source {self._part.source!r}, row {number}: no value in column {column!r} (it has "
                f"{sorted(row)}): set prompts.columns"
            )
        try:
            self.difficulty(mapped)
            if self._samples_by_row:
                self.sampling(mapped)
        except ValueError as error:
            raise ConfigError(f"prompts.source {self._part.source!r}, row {number}: {error}") from error
        self.unused -= {name for name in self.unused if mapped[name] is not None}
        return mapped

    def lacks_answer(self, mapped: Row) -> bool:
        """Whether a mapped row has no answer, though its columns should have one."""
        answer = mapped[ANSWER] if self._needs_answer else True
        if isinstance(answer, str):
            return not answer.strip()
        # NaN, which equals nothing, is how tables write that there is none.
        return answer is None or answer != answer or answer in ([], {})

    def difficulty(self, mapped: Row) -> float | None:
        """The row's difficulty, or None where no column has it; raises a ValueError if it is no number."""
        if DIFFICULTY not in self._columns:
            return None
        value = mapped[DIFFICULTY]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # An integer of any size compares, where `isfinite` would overflow.
        if not is_number or not abs(value) <= sys.float_info.max:
            raise ValueError(f"column {self._columns[DIFFICULTY]!r} (difficulty) is {value!r:.80}, expected a number")
        return float(value)

    def sampling(self, mapped: Row) -> RowSampling:
        """How the responses to a mapped row's prompt end; raises a ValueError for what has no meaning."""
        if not self._samples_by_row:
            return self._of_part
        stop, token_ids, most = (mapped.get(n) if n in self._columns else None for n in RowSampling.__slots__)
        stops = [stop] if stop and isinstance(stop, str) else stop or []
        if not isinstance(stops, list) or not all(map(_is_stop, stops)):
            raise ValueError(f"stop is {stop!r:.80}, expected a text or a list of texts, none of them empty")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(stops)} texts, expected {MAX_STOPS} at most")
        ids = token_ids or []
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise ValueError(f"stop_token_ids is {token_ids!r:.80}, expected a list of token ids")
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_response_tokens is {most!r:.80}, expected a number from 1")
        part = self._of_part
        limits = [limit for limit in (most, part.max_response_tokens) if limit is not None]
        return RowSampling((*part.stop, *stops), (*part.stop_token_ids, *ids), min(limits) if limits else None)


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and text != "" and is_unicode(text)


def _look_up(row: Row, column: str) -> Any:
    """The value of a column, or of `a.b`, which is b in a; None if there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
