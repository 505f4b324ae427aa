"""What counts as the rewards of a group: one finite float per response, in whatever form a function returns them."""

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any

import numpy
import pytest

from async_rl.rollouts.rewards.base import CORRECT_AT, MAX_REWARD, as_rewards, as_scores, correct_at, is_reward


class Scalar:
    """What torch and others have: something with a value of its own."""

    def __float__(self) -> float:
        return 0.5


GOOD = [1, 0.5, True, -1e30, 1e30, -0.0, 5e-324, Fraction(1, 3), Scalar(), numpy.float32(0.25), numpy.int64(3)]
BAD = [
    *(math.nan, math.inf, -math.inf, 1.0001e30, -1e300, 10**400),
    *(None, "1.0", b"1", "", [1.0], {}, type, 1j, numpy.float32("nan")),
]


@pytest.mark.parametrize("value", GOOD, ids=lambda value: f"{value!r:.40}")
@pytest.mark.parametrize("form", [list, tuple, iter, lambda values: (each for each in values)], ids=range(4))
def test_every_number_in_any_form_is_taken_as_a_float(form: Any, value: Any) -> None:
    rewards = as_rewards(form([value, 1.0, value]), 3)
    assert rewards == [float(value), 1.0, float(value)] and all(type(each) is float for each in rewards)


@pytest.mark.parametrize("value", BAD, ids=lambda value: f"{value!r:.40}")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_reward_is_named_with_what_was_expected(value: Any, place: int) -> None:
    values: list[Any] = [1.0, 1.0, 1.0]
    values[place] = value
    with pytest.raises(ValueError, match="among its values, expected 3 finite floats of at most 1e"):
        as_rewards(values, 3)


def test_numbers_beside_the_score_of_every_response_are_metrics() -> None:
    others = {"pred": "42", 7: 1.0, "several": numpy.ones(2)}
    first = {"score": 1, "acc": True, "length": numpy.int64(3), "more": 1.0, **others}
    second = {"score": 0.5, "acc": False, "length": 4.0, "more": math.nan, **others}
    scores = as_scores([first, second], 2)
    assert scores.rewards == (1.0, 0.5)
    assert scores.metrics == (("acc", (1.0, 0.0)), ("length", (3.0, 4.0)))
    assert as_scores([first, 0.5], 2).metrics == ()
    with pytest.raises(ValueError, match=r"it returned \{'acc': 1.0\} among its values, .*'score'"):
        as_scores([first, {"acc": 1.0}], 2)
    for name in ("", "a\n", "\udc80x"):
        with pytest.raises(ValueError, match="it returned a metric named"):
            as_scores([{"score": 1.0, name: 1.0}], 1)


@pytest.mark.parametrize("returned", [None, 1.0, "123", b"123", True, type, {0: 0.5, 1: 0.5, 2: 1.0}, {0.0, 0.5, 1.0}])
def test_what_is_no_sequence_is_named(returned: object) -> None:
    with pytest.raises(ValueError, match=r"it returned .*, expected 3 finite floats"):
        as_rewards(returned, 3)


@pytest.mark.parametrize("num", [0, 1, 2, 4, 1000])
def test_every_response_has_exactly_one(num: int) -> None:
    said = "returned more" if num > 3 else f"returned {num} values"
    with pytest.raises(ValueError, match=f"{said}, expected 3"):
        as_rewards([1.0] * num, 3)
    with pytest.raises(ValueError, match="returned more, expected 3"):
        as_rewards(count(), 3)
    assert as_rewards(numpy.ones(num), num) == [1.0] * num


def test_an_iterator_is_read_no_further_than_it_takes_to_know() -> None:
    read = []

    def values() -> Iterator[float]:
        for i in count():
            read.append(i)
            yield 1.0

    with pytest.raises(ValueError, match="returned more"):
        as_rewards(values(), 2)
    assert len(read) == 3


@pytest.mark.parametrize("huge", [MAX_REWARD, -MAX_REWARD])
def test_the_largest_reward_is_one_and_its_squares_are_finite(huge: float) -> None:
    assert is_reward(huge) and not is_reward(huge * 1.01) and math.isfinite(10**6 * huge**2)


def test_a_threshold_is_an_attribute_of_the_function_itself() -> None:
    def score() -> None: ...

    assert correct_at(0.5)(score) is score and getattr(score, CORRECT_AT) == 0.5
