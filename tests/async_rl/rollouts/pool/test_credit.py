"""How many responses an instance gets at once."""

from random import Random

import pytest

from async_rl.rollouts.pool.member import FIRST_CREDIT, MAX_CREDIT, QUEUE_S, Credit


@pytest.mark.parametrize("told", [1, 64, 10_000])
def test_an_instance_gets_as_many_responses_as_it_says_whatever_was_found(told: int) -> None:
    credit = Credit()
    credit.first_token(FIRST_CREDIT, 0.0)
    assert credit.responses(told) == told


def test_the_credit_of_one_that_does_not_say_doubles_while_it_takes_everything_in_at_once() -> None:
    for seed in range(50):
        rng, credit = Random(seed), Credit()
        expected = FIRST_CREDIT
        for _ in range(40):
            num_open = rng.choice((1, expected - 1, expected, 2 * expected, 10_000))
            waited_s = rng.choice((0.0, QUEUE_S - 0.01, QUEUE_S, 60.0))
            assert credit.responses(None) == expected
            credit.first_token(num_open, waited_s)
            if num_open >= expected and waited_s < QUEUE_S:
                expected = min(2 * expected, MAX_CREDIT)
        assert FIRST_CREDIT <= credit.responses(None) <= MAX_CREDIT
