"""Which cases of a test `make test` runs."""

import itertools
import random

import pytest

from tests.support.tiers import beyond_a_cover


def values(cases: list[list[str]]) -> set[tuple[int, str]]:
    return {value for case in cases for value in enumerate(case)}


def test_each_value_of_each_parameter_stays_and_most_combinations_do_not() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(2, 4))]
        cases = [[f"{i}" for i in case] for case in itertools.product(*map(range, sizes))]
        cases = rng.sample(cases, rng.randint(1, len(cases)))
        left = beyond_a_cover(cases)
        kept = [case for place, case in enumerate(cases) if place not in left]
        assert values(kept) == values(cases)
        assert len(kept) <= sum(sizes)
        assert beyond_a_cover(cases) == left
    assert len(beyond_a_cover([[a, b] for a in "abc" for b in "xyz"])) >= 4


def test_cases_of_one_list_all_stay() -> None:
    assert beyond_a_cover([["a"], ["b"], ["c"]]) == []


@pytest.mark.parametrize(("first", "second"), [(1, "x-y")])
@pytest.mark.parametrize("third", [2])
def test_pytest_names_one_value_per_parameter(
    request: pytest.FixtureRequest, first: int, second: str, third: int
) -> None:
    # What tests/conftest.py takes for the cases.
    assert request.node.callspec._idlist == ["2", "1-x-y"]
