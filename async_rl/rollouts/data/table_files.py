"""The files of a prompt table: written in chunks of rows, so that memory does not grow with the source; then mapped.

numbers.i64 ends.i64 tokens.i32 keys.u64 difficulties.f64    the arrays of `prompt_table`
places.i64                                                    where the source has each prompt's row
rows.arrow                                                    its rows, where the source cannot be read in any order
table.json                                digests, the longest prompt, what was left out, sums of the other files
"""

import hashlib
import json
import logging
import mmap
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from async_rl.errors import ConfigError
from async_rl.method.types import NO_CHECK, AnswerCheck, Prompt
from async_rl.rollouts.data.columns import RowColumns, RowSampling
from async_rl.rollouts.data.numbered_rows import NumberedRow, checked_rows
from async_rl.rollouts.data.part import SourcePart
from async_rl.rollouts.data.prompt_table import Arrays, Numbers, PromptTable
from async_rl.rollouts.data.rendering import (
    Tokenizer,
    identity_of,
    render,
    require_unicode,
    tokenize,
)
from async_rl.rollouts.data.row import Row, Rows
from async_rl.rollouts.data.task_rows import REASONING_GYM
from async_rl.shared.files import named_write_errors

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_ROWS = 1024

ALL_MEASURED, MEASURED_EVERY, LAST_MEASURED = 2_000, 50, 50_000
"""Of rows that are measured without a table: all of the first ones, then one of so many, up to a last one; seconds."""

TASKS_MEASURED = 100
"""Of rows that are generated, which takes longer."""

MAX_NAMED_IDS = 10

ABOUT = "table.json"

_FILES = {
    "numbers": ("numbers.i64", "q"),
    "ends": ("ends.i64", "q"),
    "tokens": ("tokens.i32", "i"),
    "keys": ("keys.u64", "Q"),
    "difficulties": ("difficulties.f64", "d"),
    "places": ("places.i64", "q"),
}


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """The prompts of a part, digests of all of them, the index of the longest one, and how many rows were read."""

    part: SourcePart
    table: PromptTable
    digests: Mapping[str, str]
    longest: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """What is known of a part without a table: its first prompt that can be used, how many there are among the rows
    that were measured, whether these are all, and what was left out, a line for each reason."""

    first: Prompt
    num_left: int
    is_whole: bool
    report: Sequence[str]


class _RowsAt(Sequence[Row]):
    """Rows that are read on access."""

    def __init__(self, rows: Rows, places: Numbers) -> None:
        self._rows = rows
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._rows.row_at(self._places[index])


def write_table(
    part: SourcePart,
    rows: Rows,
    tokenizer: Tokenizer,
    directory: Path,
    max_rows: int | None = None,
    answers: AnswerCheck = NO_CHECK,
) -> None:
    """Reads, renders and tokenizes the first `max_rows` rows of a part, or all, into files of `directory`.

    Raises:
        ConfigError: the source cannot be read or is malformed, or no prompt is left.
        WriteFailed: the files cannot be written.
    """
    left_out = _LeftOut(part, answers)
    with named_write_errors(directory):
        with _Writer(directory) as writer:
            for chunk in _chunks(checked_rows(part, rows, max_rows), CHUNK_ROWS):
                _write_chunk(part, chunk, tokenizer, writer, left_out)
        left_out.require_some(writer.num_prompts)
        rows.save(directory)
        digests = _open(part, rows, directory).digests()
        about = {"digests": digests, "longest": writer.longest, "report": left_out.report(), "rows": left_out.num_rows}
        (directory / ABOUT).write_text(json.dumps({**about, "files": _sums(directory)}))


def measure_part(
    part: SourcePart, rows: Rows, tokenizer: Tokenizer, answers: AnswerCheck, max_rows: int | None = None
) -> MeasuredPart:
    """What `write_table` would find, of the first rows and a sample of the following ones; it writes nothing.

    Raises:
        ConfigError: the source cannot be read or is malformed, or no prompt is left.
    """
    limit = min(max_rows or LAST_MEASURED, TASKS_MEASURED if part.source.startswith(REASONING_GYM) else LAST_MEASURED)
    left_out = _LeftOut(part, answers)
    first: Prompt | None = None
    num_read = num_left = 0

    def chosen() -> Iterator[NumberedRow]:
        nonlocal num_read
        for row in checked_rows(part, rows, limit):
            num_read += 1
            if row.number < ALL_MEASURED or row.number % MEASURED_EVERY == 0:
                yield row

    for chunk in _chunks(chosen(), CHUNK_ROWS):
        for row, token_ids in zip(chunk, tokenize(_rendered(part, chunk, tokenizer), part, tokenizer), strict=True):
            if left_out.accepts(row, token_ids):
                num_left += 1
                first = first or row.prompt(part, token_ids)
    left_out.require_some(num_left)
    if first is None:
        raise ConfigError(f"prompts.source {part.source!r} has only empty prompts: correct its prompts")
    return MeasuredPart(first, num_left, num_read < min(limit, ALL_MEASURED), left_out.report())


def is_whole(directory: Path) -> bool:
    """Whether a directory has a table's files as they were written: a disk may lose or change them."""
    try:
        about = json.loads((directory / ABOUT).read_text())
        return isinstance(about, dict) and about.get("files") == _sums(directory)
    except (OSError, ValueError):
        return False


def _sums(directory: Path) -> dict[str, str]:
    """A digest of each file but `ABOUT`, by its name."""
    sums = {}
    for path in sorted(directory.iterdir()):
        if path.name != ABOUT:
            with path.open("rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def open_table(part: SourcePart, rows: Rows, directory: Path) -> LoadedPart:
    """The table whose files are in `directory`, which may be removed then; logs what was left out of it."""
    about = json.loads((directory / ABOUT).read_text())
    for line in about["report"]:
        logger.warning("prompts.source %r: %s", part.source, line)
    return LoadedPart(part, _open(part, rows, directory), about["digests"], about["longest"], about["rows"])


def _open(part: SourcePart, rows: Rows, directory: Path) -> PromptTable:
    rows.load(directory)
    columns = RowColumns(part, next(rows.scan())[1])

    def read(row: Row) -> tuple[Row, RowSampling]:
        mapped = columns.mapped(row)
        return mapped, columns.sampling(mapped)

    arrays = {name: _mapped(directory / file, kind) for name, (file, kind) in _FILES.items()}
    places = arrays.pop("places")
    return PromptTable(part.name, Arrays(**arrays), _RowsAt(rows, places), read, part.reward)


def _mapped(path: Path, kind: Any) -> Numbers:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return array(kind)
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)).cast(kind)


class _Writer:
    """Appends prompts to the files of a table."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.num_prompts = 0
        self.longest = 0
        self._most_tokens = -1
        self._num_tokens = 0

    def __enter__(self) -> "_Writer":
        self._open = ExitStack()
        self._files = {n: self._open.enter_context((self._directory / f).open("wb")) for n, (f, _) in _FILES.items()}
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def append(self, prompts: Sequence[tuple[NumberedRow, Sequence[int], bytes]]) -> None:
        """Adds prompts: their rows, token ids and keys."""
        new: dict[str, array[Any]] = {name: array(kind) for name, (_, kind) in _FILES.items()}
        for row, token_ids, key in prompts:
            if len(token_ids) > self._most_tokens:
                self._most_tokens, self.longest = len(token_ids), self.num_prompts
            self.num_prompts += 1
            self._num_tokens += len(token_ids)
            new["numbers"].append(row.number)
            new["ends"].append(self._num_tokens)
            new["tokens"].extend(token_ids)
            new["keys"].frombytes(key)
            new["places"].append(row.place)
            difficulty = row.columns.difficulty(row.row)
            if difficulty is not None:
                new["difficulties"].append(difficulty)
        for name, values in new.items():
            values.tofile(self._files[name])


def _write_chunk(
    part: SourcePart, chunk: Sequence[NumberedRow], tokenizer: Tokenizer, writer: _Writer, left_out: "_LeftOut"
) -> None:
    texts = _rendered(part, chunk, tokenizer)
    tokenized = tokenize(texts, part, tokenizer)
    writer.append(
        [
            (row, token_ids, _key(identity_of(row.row, part), text.encode("utf-8", "surrogatepass")))
            for row, token_ids, text in zip(chunk, tokenized, texts, strict=True)
            if left_out.accepts(row, token_ids)
        ]
    )


def _key(prompt: bytes, text: bytes) -> bytes:
    """Eight bytes of the prompt as its row has it, by which it is held out, and eight of its rendered text."""
    return blake2b(prompt, digest_size=8).digest() + blake2b(text, digest_size=8).digest()


def _rendered(part: SourcePart, chunk: Sequence[NumberedRow], tokenizer: Tokenizer) -> list[str]:
    """
    Raises:
        ConfigError: the chat template does not take a row's messages, a text has what no tokenizer takes, or a row's
            stop tokens are none of the tokenizer's.
    """
    for row in chunk:
        # Those of a part are held against the model by the pre-flight.
        own = row.columns.sampling(row.row).stop_token_ids[len(part.stop_token_ids) :]
        outside = [token for token in own if token >= len(tokenizer)]
        if outside:
            raise ConfigError(
                f"prompts.source {part.source!r}, row {row.number}: stop_token_ids has {outside[0]}, but the tokens of "
                f"the tokenizer are 0 to {len(tokenizer) - 1}: look the ids up there"
            )
    try:
        texts = render([row.row for row in chunk], part, tokenizer)
    except ConfigError:
        raise
    # A template is a program of the model's author, and may raise anything.
    except Exception as error:
        if len(chunk) > 1:
            return [text for row in chunk for text in _rendered(part, [row], tokenizer)]
        raise ConfigError(
            f"prompts.source {part.source!r}, row {chunk[0].number}: the tokenizer's chat template does not render its "
            f"prompt: {type(error).__name__}: {error}; correct the row, or the template"
        ) from error
    for row, text in zip(chunk, texts, strict=True):
        require_unicode(text, row.number, part)
    return texts


class _LeftOut:
    """Counts the rows that cannot be used, and remembers the first ones."""

    def __init__(self, part: SourcePart, answers: AnswerCheck) -> None:
        self._limit = part.max_prompt_tokens
        self._reward = part.reward
        self._answers = answers
        self.num_rows = 0
        self._empty = _Rows()
        self._unanswered = _Rows()
        self._unreadable = _Rows()
        self._reason = ""
        self._longer = _Rows()
        self._longest = 0

    def accepts(self, row: NumberedRow, token_ids: Sequence[int]) -> bool:
        self.num_rows += 1
        if not token_ids:
            self._empty.add(row.number)
        elif len(token_ids) > self._limit:
            self._longer.add(row.number)
            self._longest = max(self._longest, len(token_ids))
        elif row.columns.lacks_answer(row.row):
            self._unanswered.add(row.number)
        elif (reason := self._answers.fault_of(row.row, self._reward)) is not None:
            self._reason = self._reason or reason
            self._unreadable.add(row.number)
        else:
            return True
        return False

    def report(self) -> list[str]:
        """What is left out, a line for each reason."""
        lines = []
        if self._empty.count:
            lines.append(f"{self._empty.count} of {self.num_rows} prompts are empty and left out: rows {self._empty}")
        if self._unanswered.count:
            lines.append(
                f"{self._unanswered.count} of {self.num_rows} prompts have no answer and are left out: rows "
                f"{self._unanswered}"
            )
        if self._unreadable.count:
            lines.append(
                f"{self._unreadable.count} of {self.num_rows} prompts have an answer that the reward cannot read and "
                f"are left out: rows {self._unreadable}; the first: {self._reason}"
            )
        if self._longer.count:
            lines.append(f"{self._too_long()}; they are left out")
        return lines

    def require_some(self, num_left: int) -> None:
        """Raises a ConfigError if limits leave no prompt."""
        if num_left:
            return
        if self._longer.count:
            raise ConfigError(f"{self._too_long()}; none is left: raise the limit or shorten the prompts")
        if self._unanswered.count or self._unreadable.count:
            raise ConfigError(f"{self.report()[-1]}; none is left: correct the column of answers in prompts.columns")

    def _too_long(self) -> str:
        return (
            f"{self._longer.count} of {self.num_rows} prompts have more than prompts.max_prompt_tokens = {self._limit} "
            f"tokens (longest: {self._longest}): rows {self._longer}"
        )


class _Rows:
    """A number of rows, of which the first ones are named."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[int] = []

    def add(self, number: int) -> None:
        self.count += 1
        if len(self._first) < MAX_NAMED_IDS:
            self._first.append(number)

    def __str__(self) -> str:
        more = self.count - len(self._first)
        return ", ".join(map(str, self._first)) + (f" and {more} more" if more else "")


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk
