"""What benchmarks of generation and training compare engines at."""

import argparse
from typing import NamedTuple

from benchmarks.common.random_model import SIZES

RESPONSE_TOKENS = 64
"""Of every response."""


class Case(NamedTuple):
    """`num_groups` prompts of `prompt_tokens` tokens, each with `group_size` responses, and a model of `SIZES`."""

    size: str
    prompt_tokens: int
    group_size: int
    num_groups: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """
        Raises:
            argparse.ArgumentTypeError: `text` is not `SIZE:P:G:GROUPS`.
        """
        size, *numbers = text.split(":")
        are_numbers = all(number.isdecimal() and int(number) for number in numbers)
        if size not in SIZES or len(numbers) != 3 or not are_numbers:
            known = f"one of {', '.join(SIZES)}, and numbers from 1 on"
            raise argparse.ArgumentTypeError(f"{text!r}: expected SIZE:P:G:GROUPS, {known}")
        return cls(size, *map(int, numbers))

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @property
    def num_responses(self) -> int:
        return self.group_size * self.num_groups

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return self.num_responses * RESPONSE_TOKENS
