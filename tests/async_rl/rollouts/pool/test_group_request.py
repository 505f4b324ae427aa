"""What of a request is still open, how fast it is, and how it is called off."""

import pytest

from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import GroupRequest, Member
from tests.support.members import ready_member


def begun(num_partials: int, num_tokens: int, num_before: int = 0) -> tuple[Member, GroupRequest]:
    partials = [PartialRollout(j) for j in range(num_partials)]
    partials[0].token_ids.extend([5] * num_before)
    member, request = ready_member("a"), GroupRequest(partials, 1)
    member.begin(request)
    member.progress(request, num_tokens, 0, 100.0)
    return member, request


@pytest.mark.parametrize(("num_partials", "num_tokens", "after_s", "speed"), [(1, 10, 2.0, 5.0), (4, 40, 5.0, 2.0)])
def test_speed_is_that_of_one_response_since_its_first_token(
    num_partials: int, num_tokens: int, after_s: float, speed: float
) -> None:
    _, request = begun(num_partials, num_tokens)
    assert request.speed(100.0 + after_s) == speed and request.speed(100.0) < float("inf")


def test_without_a_token_it_waits_and_has_no_speed() -> None:
    _, request = begun(2, 0)
    assert request.waits and request.speed(1e9) == 0.0 and request.num_open == 2


def test_what_the_partials_held_before_is_no_token_of_the_request() -> None:
    _, request = begun(1, 0, num_before=7)
    assert (request.num_before, request.num_tokens, request.waits) == (7, 0, True)


def test_a_move_is_told_from_a_cancellation_and_neither_needs_a_task() -> None:
    _, given_up = begun(1, 0)
    given_up.cancel()
    assert not given_up.is_moved
    _, moved = begun(1, 0)
    moved.move()
    assert moved.is_moved
