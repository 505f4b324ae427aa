"""Tokenized prompts in flat arrays: four bytes per token, where a tuple of ints takes eight, plus objects.

The arrays are in memory, or files of `table_files` that are mapped; the rows are a list, or what reads them from disk.
"""

import hashlib
import json
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from async_rl.method.token_arrays import TokenIds
from async_rl.method.types import Prompt
from async_rl.rollouts.data.columns import RowSampling
from async_rl.rollouts.data.prompt_sequence import PromptSequence
from async_rl.rollouts.data.row import Row

NUM_RANGES = 64
"""Digests of a data set, each of a range of prompts: few enough to store, enough to locate a difference."""

Numbers: TypeAlias = "array[Any] | memoryview"


@dataclass(slots=True)
class Arrays:
    """Of each prompt its row's number and the end of its tokens; of all prompts the tokens.

    `keys` are two numbers for each prompt: a digest of it as its row has it, and one of its rendered text.
    `difficulties` are empty where no column has them.
    """

    numbers: Numbers = field(default_factory=lambda: array("q"))
    ends: Numbers = field(default_factory=lambda: array("q"))
    tokens: Numbers = field(default_factory=lambda: array("i"))
    keys: Numbers = field(default_factory=lambda: array("Q"))
    difficulties: Numbers = field(default_factory=lambda: array("d"))


def _as_it_is(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], RowSampling]:
    return row, RowSampling()


class PromptTable(PromptSequence):
    """Prompts that are created on access; `prompt_id` is the number of their row, after the name of a mixture's part.

    Args:
        rows: as their source has them, in the order of the prompts.
        read: makes of such a row the one of the prompt, and how responses to it end.
        reward: of all its prompts, as `Prompt` has it.
    """

    def __init__(
        self,
        name: str = "",
        arrays: Arrays | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        read: Callable[[Row], tuple[Mapping[str, Any], RowSampling]] | None = None,
        reward: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.arrays = Arrays() if arrays is None else arrays
        self._rows: Any = [] if rows is None else rows
        self._read: Any = _as_it_is if read is None else read
        self._reward = reward

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], name: str = "") -> "PromptTable":
        """Prompts by name only, for a rank that samples nothing: without tokens and rows."""
        table = cls(name)
        nothing: Mapping[str, Any] = {}
        for number in numbers:
            table.append(number, (), nothing)
        return table

    def append(self, number: int, token_ids: Sequence[int], row: Mapping[str, Any]) -> None:
        """Adds a prompt to a table in memory."""
        arrays = self.arrays
        assert isinstance(arrays.numbers, array) and isinstance(arrays.ends, array) and isinstance(arrays.tokens, array)
        arrays.numbers.append(number)
        arrays.tokens.extend(token_ids)
        arrays.ends.append(len(arrays.tokens))
        self._rows.append(row)

    @property
    def numbers(self) -> list[int]:
        """The row numbers of all prompts."""
        return self.arrays.numbers.tolist()

    def prompt_id(self, index: int) -> str:
        number = self.arrays.numbers[index]
        return f"{self.name}/{number}" if self.name else str(number)

    def index_of(self, number: str) -> int | None:
        """The index of the prompt of that row; they are in the order of their rows."""
        numbers = self.arrays.numbers
        if not number.isdecimal():
            return None
        index = bisect_left(numbers, int(number))
        return index if index < len(numbers) and numbers[index] == int(number) else None

    def __len__(self) -> int:
        return len(self.arrays.numbers)

    def prompt_at(self, index: int) -> Prompt:
        row, sampling = self._read(self._rows[index])
        return Prompt(
            self.prompt_id(index),
            TokenIds.of_bytes(self._tokens(index)),
            row,
            sampling.stop,
            sampling.stop_token_ids,
            sampling.max_response_tokens,
            self._reward,
        )

    def num_tokens(self, index: int) -> int:
        ends = self.arrays.ends
        return int(ends[index] - (ends[index - 1] if index else 0))

    def digests(self) -> dict[str, str]:
        """A digest of the names, tokens and rows of each range of prompts, named after its first and last one."""
        found: dict[str, str] = {}
        for part in range(min(NUM_RANGES, len(self))):
            first, end = (len(self) * bound // min(NUM_RANGES, len(self)) for bound in (part, part + 1))
            digest = hashlib.sha256()
            for index in range(first, end):
                digest.update(json.dumps([self.arrays.numbers[index], self._rows[index]], default=repr).encode())
                digest.update(self._tokens(index).tobytes())
            found[f"{self.prompt_id(first)} to {self.prompt_id(end - 1)}"] = digest.hexdigest()[:16]
        return found

    def _tokens(self, index: int) -> Numbers:
        ends = self.arrays.ends
        return self.arrays.tokens[ends[index - 1] if index else 0 : ends[index]]
