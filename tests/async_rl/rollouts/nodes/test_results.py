"""What a node may return."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from async_rl.config.pipeline import FOR_TRAINING, OF_TOKENS
from async_rl.rollouts.nodes.results import MAX_FACTOR, NotNumbers, numbers_of

LENGTHS = (3, 1)


@pytest.mark.parametrize("writes", ["style", *FOR_TRAINING])
def test_numbers_are_floats_whatever_they_were_in(writes: str) -> None:
    if writes in OF_TOKENS:
        given: list[Any] = [[[1, 0.5, True], [2]], (np.array([1, 0.5, 1]), (2.0,)), iter([iter([1, 0.5, 1]), [2]])]
        expected: list[Any] = [[1.0, 0.5, 1.0], [2.0]]
    else:
        given, expected = [[1, 0.5], np.array([1, 0.5], dtype=np.float32), iter([1, 0.5])], [1.0, 0.5]
    for values in given:
        found = numbers_of(writes, values, 2, LENGTHS)
        assert found == expected


def endless() -> Iterator[float]:
    while True:
        yield 1.0


OF_ROLLOUTS: list[tuple[Any, str]] = [
    (None, "returned None"),
    (1.0, "returned 1.0"),
    ("ab", "returned 'ab'"),
    ({"a": 1, "b": 2}, "returned {"),
    ({1.0, 2.0}, "returned {"),
    ([1.0], "returned 1 values"),
    ([1.0, 2.0, 3.0], "returned more"),
    (endless(), "returned more"),
    ([1.0, float("nan")], "returned nan among"),
    ([float("inf"), 1.0], "returned inf among"),
    ([1.0, "2"], "returned '2' among"),
    ([1.0, None], "returned None among"),
    ([1.0, [1.0]], r"returned \[1.0\] among"),
    ([10**400, 1.0], "among its values"),
]


@pytest.mark.parametrize(("returned", "said"), OF_ROLLOUTS)
def test_other_results_are_named(returned: Any, said: str) -> None:
    for writes in ("style", "shaped_rewards", "rollout_weights"):
        with pytest.raises(NotNumbers, match=rf"{said}.*expected 2 finite floats, .* one per rollout"):
            numbers_of(writes, returned, 2, LENGTHS)


OF_TOKEN: list[tuple[Any, str]] = [
    ([1.0, 1.0], "returned 1.0 for .*expected 3 finite floats, .*sampled token of response 0"),
    ([[1.0, 1.0, 1.0]], "returned 1 values for .*expected 2 lists, one per response"),
    ([[1.0, 1.0], [1.0]], "returned 2 values for .*expected 3 .*response 0"),
    ([[1.0, 1.0, 1.0], [float("nan")]], "returned nan among .*response 1"),
    ([[1.0, 1.0, 2 * MAX_FACTOR], [1.0]], "among its values .*response 0"),
]


@pytest.mark.parametrize(("returned", "said"), OF_TOKEN)
def test_so_are_other_numbers_of_tokens(returned: Any, said: str) -> None:
    for writes in OF_TOKENS:
        with pytest.raises(NotNumbers, match=said):
            numbers_of(writes, returned, 2, LENGTHS)


def test_weights_are_not_negative() -> None:
    with pytest.raises(NotNumbers, match=r"returned -1\.0 among"):
        numbers_of("rollout_weights", [1.0, -1.0], 2, LENGTHS)
    with pytest.raises(NotNumbers, match=r"returned 1e-60 among .*0 or from 1e-06 to 1e"):
        numbers_of("rollout_weights", [1.0, 1e-60], 2, LENGTHS)
    with pytest.raises(NotNumbers, match="returned -1 among"):
        numbers_of("token_weights", [[1, 1, 1], [-1]], 2, LENGTHS)
    assert numbers_of("token_rewards", [[1, 1, 1], [-1]], 2, LENGTHS) == [[1.0, 1.0, 1.0], [-1.0]]
