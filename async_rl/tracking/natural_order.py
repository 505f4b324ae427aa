"""The order of instances for readers: `instance-2` before `instance-10`; for the live view and the dashboard."""

import re

_NUMBER = re.compile(r"([0-9]+)")


def natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    """A key for sorting, which compares the numbers in names as numbers, of any length."""
    words = _NUMBER.split(name)
    numbers = [number.lstrip("0") for number in words[1::2]] + [""]
    return tuple((text, len(number), number) for text, number in zip(words[::2], numbers, strict=True))
