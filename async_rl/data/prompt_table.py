"""Tokenized prompts in flat arrays: four bytes per token, where a tuple of ints takes eight, plus objects."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, overload

from async_rl.types import Prompt

NUM_RANGES = 64
"""Digests of a data set, each of a range of prompts: few enough to store, enough to locate a difference."""


class PromptTable(Sequence[Prompt]):
    """Prompts that are created on access; `prompt_id` is the number of their row."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._ends = array("q", [0])
        self._tokens = array("i")
        self._rows: list[Mapping[str, Any]] = []

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "PromptTable":
        """Prompts by name only, for a rank that samples nothing: without tokens and rows."""
        table = cls()
        nothing: Mapping[str, Any] = {}
        for number in numbers:
            table.append(number, (), nothing)
        return table

    def append(self, number: int, token_ids: Sequence[int], row: Mapping[str, Any]) -> None:
        self._numbers.append(number)
        self._tokens.extend(token_ids)
        self._ends.append(len(self._tokens))
        self._rows.append(row)

    @property
    def numbers(self) -> list[int]:
        """The row numbers of all prompts."""
        return self._numbers.tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        token_ids = self._tokens[self._ends[index] : self._ends[index + 1]]
        return Prompt(str(self._numbers[index]), tuple(token_ids), self._rows[index])

    def digests(self) -> dict[str, str]:
        """A digest of the names, tokens and rows of each range of prompts, named after its first and last one."""
        found: dict[str, str] = {}
        for part in range(min(NUM_RANGES, len(self))):
            first, end = (len(self) * bound // min(NUM_RANGES, len(self)) for bound in (part, part + 1))
            digest = hashlib.sha256()
            for index in range(first, end):
                digest.update(json.dumps([self._numbers[index], self._rows[index]], default=repr).encode())
                digest.update(self._tokens[self._ends[index] : self._ends[index + 1]].tobytes())
            found[f"{self._numbers[first]} to {self._numbers[end - 1]}"] = digest.hexdigest()[:16]
        return found
