"""The rows of a source as a run has them: by their numbers, their columns mapped, and each checked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from async_rl.errors import ConfigError
from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Prompt
from async_rl.rollouts.data.columns import RowColumns
from async_rl.rollouts.data.part import SourcePart
from async_rl.rollouts.data.rendering import require_place_for_system_prompt, require_renderable
from async_rl.rollouts.data.row import Row, Rows


@dataclass(frozen=True, slots=True)
class NumberedRow:
    """A row by its number in the source, and the place where the source has it; `columns` have mapped it."""

    number: int
    place: int
    row: Row
    columns: RowColumns

    def prompt(self, part: SourcePart, token_ids: Sequence[int]) -> Prompt:
        """The prompt of a row that is in no table."""
        ends = self.columns.sampling(self.row)
        name = f"{part.name}/{self.number}" if part.name else str(self.number)
        return Prompt(
            *(name, TokenIds(token_ids), self.row, ends.stop, ends.stop_token_ids, ends.max_response_tokens),
            part.reward,
        )


def checked_rows(part: SourcePart, rows: Rows, max_rows: int | None) -> Iterator[NumberedRow]:
    """The first `max_rows` rows of a part, or all, checked as far as possible without a tokenizer.

    Raises:
        ConfigError: the source cannot be read, or a row has no prompt that can be rendered; while they are read.
    """
    require_place_for_system_prompt(part)
    columns: RowColumns | None = None
    number = -1
    try:
        for number, (place, row) in enumerate(islice(rows.scan(), max_rows)):
            columns = columns or RowColumns(part, row)
            mapped = columns.checked(row, number)
            require_renderable(mapped, number, part)
            yield NumberedRow(number, place, mapped, columns)
    except OSError as error:
        raise ConfigError(
            f"prompts.source {part.source!r} cannot be read: {error.strerror or error}; check the path"
        ) from error
    if columns is None:
        raise ConfigError(f"prompts.source {part.source!r} has no rows")
    if columns.unused and (max_rows is None or number + 1 < max_rows):
        raise ConfigError(
            f"prompts.source {part.source!r}: no row has a value for {sorted(columns.unused)} of its columns "
            f"({dict(part.columns)}): correct them"
        )
