"""Which requests go from a slow instance to an idle one: the choice, which is pure, and then the way they take."""

from collections.abc import Callable
from typing import Any

import pytest

from async_rl.rollouts.instance.client import InstanceClient
from async_rl.rollouts.instance.connections import Connections
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import GroupRequest, Member
from async_rl.rollouts.pool.membership import InstanceEntry, Membership
from async_rl.rollouts.pool.router import STRAGGLING, STRAGGLING_S, next_moves
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.pools import Pools
from tests.support.scripted_instance import sample
from tests.support.waiting import wait_for

NOW_S = 1000.0
PACE = 80.0
DEADLINE_S = 60.0


def member(name: str, *, pace: float | None = None) -> Member:
    entry = InstanceEntry(f"http://{name}")
    Membership().end_publish("v1", [entry], {entry.url: None})
    return Member(name, InstanceClient(Connections(), entry.url, 60.0), entry, response_speed=pace)


def begun(at: Member, tokens_per_s: float, ago_s: float, num_moves: int = 0) -> GroupRequest:
    """A request of one response that has had tokens for `ago_s` seconds."""
    request = GroupRequest([PartialRollout(0)], 1, num_moves)
    at.begin(request)
    at.progress(request, 1, 0, NOW_S - ago_s)
    at.progress(request, round(tokens_per_s * ago_s), 0, NOW_S)
    return request


def moves(*members: Member) -> list[GroupRequest]:
    return next_moves(members, lambda member: True, NOW_S)


def test_one_token_a_minute_moves_to_an_idle_instance_and_the_slowest_goes_first() -> None:
    slow, idle = member("slow"), member("idle", pace=PACE)
    begun(slow, 1.0, 600.0)
    trickling = begun(slow, 1 / 60, 600.0)
    assert moves(slow, idle) == [trickling]


@pytest.mark.parametrize(
    ("tokens_per_s", "ago_s", "num_moves", "pace"),
    [
        (PACE / STRAGGLING * 1.05, 600.0, 0, PACE),
        (1.0, STRAGGLING_S - 1.0, 0, PACE),
        (1.0, 600.0, 1, PACE),
        (1.0, 600.0, 0, None),
    ],
    ids=["not slow enough", "just begun", "moved before", "nobody knows how fast the idle one is"],
)
def test_what_was_begun_stays_otherwise(tokens_per_s: float, ago_s: float, num_moves: int, pace: float | None) -> None:
    slow, idle = member("slow"), member("idle", pace=pace)
    begun(slow, tokens_per_s, ago_s, num_moves)
    assert moves(slow, idle) == []


def test_an_instance_with_work_takes_nothing_that_was_begun() -> None:
    slow, busy = member("slow"), member("busy", pace=PACE)
    begun(slow, 0.1, 600.0)
    begun(busy, PACE, 20.0)
    assert moves(slow, busy) == []


def test_an_idle_instance_is_promised_to_one_request_only() -> None:
    slow, idle, other = member("slow"), member("idle", pace=PACE), member("other", pace=PACE)
    requests = [begun(slow, 0.1 * i, 600.0) for i in (1, 2, 3)]
    first = moves(slow, idle, other)
    assert first == requests[:2]
    for request in first:
        request.is_moved = True
    assert moves(slow, idle, other) == []


def waiting(at: Member, for_s: float, num_moves: int = 0) -> GroupRequest:
    request = GroupRequest([PartialRollout(0)], 1, num_moves)
    request.sent_s = NOW_S - for_s
    at.begin(request)
    return request


def started_after(at: Member, waited_s: float) -> None:
    """One of its requests got its first token, and is over."""
    request = waiting(at, waited_s)
    at.progress(request, 1, 1, NOW_S)
    at.end(request)


@pytest.mark.parametrize("start_s", [0.1, 3.0])
def test_what_waits_at_a_wholly_silent_instance_moves_after_eight_times_the_others_longest_start(
    start_s: float,
) -> None:
    silent, idle = member("silent"), member("idle")
    started_after(idle, start_s / 2)
    started_after(idle, start_s)
    limit_s = max(STRAGGLING_S, STRAGGLING * start_s)
    waiting(silent, limit_s - 0.5)
    moved = waiting(silent, limit_s + 0.5)
    waiting(silent, limit_s + 0.5, num_moves=1)
    assert moves(silent, idle) == [moved]
    silent.client.streams = False
    assert moves(silent, idle) == []


def test_what_waits_at_a_silent_instance_stays_where_nobody_else_has_started_anything() -> None:
    silent, idle = member("silent"), member("idle")
    waiting(silent, 600.0)
    assert moves(silent, idle) == []


@pytest.fixture
def pool_of(pools_with: Callable[..., Pools]) -> Callable[..., InferencePool]:
    return pools_with().make


@pytest.mark.distributed
@pytest.mark.parametrize("versions_at_end", [False, True])
def test_what_is_moved_goes_on_from_where_it_was(
    instances: Callable[..., list[Any]],
    pool_of: Callable[..., InferencePool],
    loop: EventLoopThread,
    versions_at_end: bool,
) -> None:
    """The slow one has made three tokens and makes no more. As vLLM does, it may tell their version at the end only."""
    slow, fast = instances(
        {"stream": True, "stop_after": 3, "fate": "hang", "versions_at_end": versions_at_end}, {"stream": True}
    )
    pool = pool_of(slow, fast)
    seed = next(seed for seed in range(100) if len(sample(seed, 2, 40)[0]) > 10)
    sampling = SamplingParams(n=1, max_tokens=40, seed=seed, logprobs=0)
    running = loop.submit(pool.generate_group((3, 4), sampling, "v1-0", "v1"))
    at_slow = pool.find(slow.url)
    wait_for(lambda: at_slow.num_tokens >= 3)

    async def move() -> None:
        (request,) = at_slow.requests
        request.move()

    loop.run(move())
    (response,), num_attempts = running.result(DEADLINE_S)
    assert response.token_ids == tuple(sample(seed, 2, 40)[0])
    assert (response.num_continued, response.num_resampled, response.instance) == (1, 0, fast.url)
    assert num_attempts == 1 and at_slow.num_failures == 0 and at_slow.state == "ready"
    assert at_slow.num_open == 0 and not at_slow.waiting and pool.is_idle


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_wholly_silent_instance_keeps_nothing_while_another_idles(
    instances: Callable[..., list[Any]], pool_of: Callable[..., InferencePool], loop: EventLoopThread
) -> None:
    """It is healthy, and takes requests without ever answering one."""
    silent, sound = instances({"stream": True, "stop_after": 0, "fate": "hang"}, {"stream": True})
    pool = pool_of(silent, sound)
    sampling = SamplingParams(n=1, max_tokens=40, seed=5, logprobs=0)
    running = [loop.submit(pool.generate_group((3, i), sampling, f"v1-{i}", "v1")) for i in range(4)]
    # Otherwise it would keep them for `pool.request_timeout_s`, ten times as long.
    responses = [group.result(DEADLINE_S)[0][0] for group in running]
    assert {response.instance for response in responses} == {sound.url}
    assert pool.find(silent.url).state == "ready"
