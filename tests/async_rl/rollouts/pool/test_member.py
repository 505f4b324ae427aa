"""The figures of a member are those that follow from its requests, in whatever order they begin, go on and end."""

from random import Random

from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import GroupRequest, Member
from tests.support.members import ready_member


def require_figures(member: Member, under_way: list[GroupRequest], num_tokens: int) -> None:
    assert member.requests == set(under_way)
    assert member.waiting == {request for request in under_way if request.num_tokens == 0}
    assert member.num_open == sum(len(request.partials) - request.num_ended for request in under_way)
    assert member.num_tokens == num_tokens
    assert member.info().num_requests == len(under_way)


def test_open_and_waiting_requests_are_counted_whatever_happens_to_them() -> None:
    for seed in range(60):
        rng, member = Random(seed), ready_member("a")
        under_way: list[GroupRequest] = []
        num_tokens = 0
        for step in range(80):
            if not under_way or rng.random() < 0.3:
                under_way.append(GroupRequest([PartialRollout(j) for j in range(rng.randint(1, 5))], 1))
                member.begin(under_way[-1])
            request = rng.choice(under_way)
            more = rng.choice((0, 1, 30))
            num_tokens += more
            ended = rng.randint(request.num_ended, len(request.partials)) if request.num_tokens + more else 0
            member.progress(request, request.num_tokens + more, ended, float(step))
            assert request.waits == (request.num_tokens == 0)
            if rng.random() < 0.25:
                under_way.remove(request)
                member.end(request)
            require_figures(member, under_way, num_tokens)
        for request in under_way:
            member.end(request)
        assert (member.num_open, member.waiting, member.requests) == (0, set(), set())


def test_who_is_gone_is_dead_to_others_and_a_pause_is_told_as_its_reason() -> None:
    member = ready_member("a")
    assert member.info().state == "ready" and member.info().reason is None
    member.circuit.failed(1e12, 1e12, "503")
    assert "it gets one request to try it in" in (member.info().reason or "") and not member.takes("v1")
    member.circuit.reset()
    assert member.takes("v1") and not member.takes("v2") and not member.serves("")
