"""The prompt ids of a batch in a row of `ledger.jsonl`: as a short list if possible, and always as a digest.

`as_runs` turns ids, ordered by index, into a list that has one entry for each run of consecutive row numbers:
`["0-63", "70"]`; `from_runs` reads it.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

MAX_CHARACTERS = 2048
"""Of all entries: about 200 numbers in a shuffled order. A longer list would make the ledger grow with the batch."""

_RUN = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


def as_runs(prompt_ids: Sequence[str]) -> list[str] | None:
    """The ids, runs of consecutive numbers as `first-last`; None if they are too long, or one looks like a run."""
    runs: list[str] = []
    first = last = -1
    for prompt_id in prompt_ids:
        if _RUN.fullmatch(prompt_id):
            return None
        number = int(prompt_id) if _NUMBER.fullmatch(prompt_id) else -1
        if number >= 0 and first >= 0 and number == last + 1:
            runs[-1] = f"{first}-{number}"
        else:
            first = number
            runs.append(prompt_id)
        last = number
    return runs if sum(map(len, runs)) <= MAX_CHARACTERS else None


def from_runs(runs: Iterable[str]) -> list[str]:
    """The ids from which `as_runs` made these runs."""
    prompt_ids: list[str] = []
    for entry in runs:
        if match := _RUN.fullmatch(entry):
            prompt_ids += map(str, range(int(match[1]), int(match[2]) + 1))
        else:
            prompt_ids.append(entry)
    return prompt_ids


def digest_of_ids(prompt_ids: Iterable[str]) -> str:
    """SHA-256, in hexadecimal, of the ids ordered by index, each followed by a line feed."""
    return hashlib.sha256("".join(f"{prompt_id}\n" for prompt_id in prompt_ids).encode()).hexdigest()
