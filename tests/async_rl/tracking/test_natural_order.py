"""Names in the order in which people count."""

import random

from async_rl.tracking.natural_order import natural_order


def test_numbers_in_names_are_compared_as_numbers() -> None:
    long = "9" * 5000
    expected = ["", "10.0.0.9:8000", "10.0.0.10:8000", long, "a", "b1c9", "b1c10", "instance-2", "instance-010", "x²"]
    for _ in range(20):
        names = random.sample(expected, len(expected))
        assert sorted(names, key=natural_order) == expected
