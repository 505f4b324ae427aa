import asyncio
import logging

import pytest

from async_rl.fleet.follower import FleetFollower
from async_rl.pool.inference_pool import InferencePool
from async_rl.pool.member import Member

A, B, C = (f"http://10.0.0.{i}:8000" for i in (1, 2, 3))


@pytest.fixture
def make_follower(loop):
    followers = []

    def make(pool: InferencePool, url: str, leader: int = 1, token: str | None = None) -> FleetFollower:
        followers.append(FleetFollower(pool, url, leader, token))
        return followers[-1]

    yield make
    for follower in followers:
        loop.run(follower.stop())


def names(pool: InferencePool) -> list[tuple[str, str]]:
    return [(member.name, member.url) for member in pool.members]


def test_a_follower_takes_over_who_is_a_member(make_pool, serve, loop, make_follower) -> None:
    main, other = make_pool(A, B), make_pool(A, C)
    endpoint = serve(main)
    endpoint.ask("/fleet/register", {"url": "http://[fd00::7]:8000", "name": "pod-7", "boot_id": "b"})
    loop.run(make_follower(other, endpoint.url).sync())
    assert (
        names(other) == names(main) == [("10.0.0.1:8000", A), ("10.0.0.2:8000", B), ("pod-7", "http://[fd00::7]:8000")]
    )


def test_a_follower_replaces_an_instance_that_came_back_at_another_address(
    make_pool, serve, loop, make_follower
) -> None:
    main, other = make_pool(A), make_pool(A)
    endpoint = serve(main)
    follower = make_follower(other, endpoint.url)
    for url in (B, C):
        endpoint.ask("/fleet/register", {"url": url, "name": "pod", "boot_id": url[-6:-5]})
        loop.run(follower.sync())
        assert names(other) == names(main) and other.find("pod").url == url


def test_a_drained_instance_leaves_when_every_leader_is_done_with_it(make_pool, serve, loop, make_follower) -> None:
    main, other = make_pool(A, B), make_pool(A, B)
    endpoint = serve(main)
    follower = make_follower(other, endpoint.url)
    other.find(A).outstanding_tokens = 700
    main.find(B).outstanding_tokens = 40
    loop.run(follower.sync())
    assert main.find(A).outstanding_elsewhere == 700 and other.find(A).outstanding_elsewhere == 0
    assert main.find(B).outstanding_elsewhere == 0 and other.find(B).outstanding_elsewhere == 40
    endpoint.ask("/fleet/drain", {"name": A})
    loop.run(follower.sync())
    assert other.find(A).state == "draining"
    other.find(A).outstanding_tokens = 0
    assert not main.is_drained(main.find(A))
    loop.run(follower.sync())
    assert main.find(A).outstanding_elsewhere == 0 and main.is_drained(main.find(A))
    main.remove(A)
    loop.run(follower.sync())
    assert names(other) == names(main)


@pytest.mark.parametrize("sends_at", range(3))
def test_an_instance_does_not_leave_before_every_leader_has_learned_that_it_drains(
    make_pool, serve, loop, make_follower, sends_at: int
) -> None:
    """A leader sends a request between its report of none and the response that tells it of the drain. Before, the
    instance had left by then, and the request was lost."""
    main, other = make_pool(A, B), make_pool(A, B)
    endpoint = serve(main)
    follower = make_follower(other, endpoint.url)
    loop.run(follower.sync())
    endpoint.ask("/fleet/drain", {"name": A})
    member = main.find(A)
    assert member.outstanding_elsewhere == 0 and not main.is_drained(member), "its last report is of no requests"
    for num_reports in range(3):
        if num_reports == sends_at and other.find(A).state != "draining":
            other.find(A).outstanding_tokens = 700
        loop.run(follower.sync())
        is_free = other.find(A).state == "draining" and other.find(A).outstanding_tokens == 0
        assert not main.is_drained(member) or is_free
    other.find(A).outstanding_tokens = 0
    loop.run(follower.sync())
    assert main.is_drained(member)
    main.drain(A)
    assert main.is_drained(member), "the same drain once more changes nothing"
    main.drain(B)
    assert main.is_drained(member) and not main.is_drained(main.find(B))


def test_an_instance_that_a_follower_is_done_with_is_not_added_again(make_pool, serve, loop, make_follower) -> None:
    main, other = make_pool(A, B), make_pool(A, B)
    endpoint = serve(main)
    follower = make_follower(other, endpoint.url)
    endpoint.ask("/fleet/drain", {"name": A})
    other.remove(A)
    loop.run(follower.sync())
    assert [url for _, url in names(other)] == [B]


def test_a_follower_goes_on_with_those_it_knows_when_the_endpoint_is_gone(
    make_pool, serve, loop, make_follower, caplog
) -> None:
    main, other = make_pool(A, B), make_pool(A)
    endpoint = serve(main)
    main.find(A).outstanding_tokens = 5
    follower = make_follower(other, endpoint.url)
    loop.run(follower.sync())
    assert not other.is_idle
    loop.run(endpoint.server.stop())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            loop.run(follower.sync())
    assert [url for _, url in names(other)] == [A, B]
    assert other.is_idle, "what others have under way is not known any more"
    assert caplog.text.count("the fleet endpoint does not answer") == 1


@pytest.mark.distributed
def test_one_that_the_main_leader_let_in_between_two_publishes_serves_the_others_too(
    make_pool, serve, loop, make_follower, instances, eventually
) -> None:
    """Only the main leader gives weights. Before, another leader was left without any instance once the first ones had
    gone, though one with the very weights was there."""
    first, late = instances({"version": "v1"}, {"version": "v1", "boot_id": "late-1"})
    main, other = make_pool(first.url), make_pool(first.url, timeout_s=20.0)
    for pool in (main, other):
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish("v1", [first.url]))
    follower = make_follower(other, serve(main).url)
    loop.run(follower.start())

    async def let_in() -> None:
        member = main.add(late.url, "late")
        await main.get_to_know(member, 5.0)
        main.late_joiners.admit, main._config = _nothing, main._config.model_copy(update={"join": "now"})
        await main.late_joiners.admit_now(member)

    eventually(lambda: len(other.members) == 1)
    loop.run(let_in())
    assert main.find("late").state == "ready"
    eventually(lambda: len(other.members) == 2 and other.find("late").state == "ready")
    assert other.find("late").version == "v1" and other.find("late").boot_id == "late-1"


async def _nothing(member: Member) -> None:
    """An admission: the scripted instance holds the weights already."""


@pytest.mark.distributed
def test_what_the_main_leader_says_of_another_version_or_process_is_no_evidence(
    make_pool, loop, instances, eventually
) -> None:
    first, late = instances({"version": "v1"}, {"version": "v1", "boot_id": "late-2"})
    pool = make_pool(first.url, late.url, timeout_s=20.0)
    loop.run(pool.wait_until_ready())
    loop.run(pool.begin_publish())
    loop.run(pool.end_publish("v1", [first.url]))

    async def vouch(version: str, boot_id: str) -> None:
        pool.vouch_for(pool.find(late.url), version, boot_id)

    loop.run(vouch("v0", "late-2"))
    loop.run(vouch("v1", "late-1"))
    eventually(lambda: "nobody checked" in (pool.find(late.url).reason or ""))
    assert pool.find(late.url).state == "joining"
    loop.run(vouch("v1", "late-2"))
    eventually(lambda: pool.find(late.url).state == "ready")


def test_a_follower_needs_the_runs_token(make_pool, serve, loop, make_follower, caplog) -> None:
    main, other = make_pool(A, B), make_pool(A)
    endpoint = serve(main, token="secret")
    loop.run(make_follower(other, endpoint.url).sync())
    assert len(other.members) == 1 and "401" in caplog.text
    loop.run(make_follower(other, endpoint.url, token="secret").sync())
    assert len(other.members) == 2


def test_a_follower_reports_from_start_to_stop(make_pool, serve, loop, make_follower, eventually) -> None:
    main, other = make_pool(A), make_pool(A)
    endpoint = serve(main)
    before = loop.run(tasks())
    follower = make_follower(other, endpoint.url)
    loop.run(follower.start())
    other.find(A).outstanding_tokens = 300
    eventually(lambda: main.find(A).outstanding_elsewhere == 300)
    main.add(B)
    eventually(lambda: len(other.members) == 2)
    loop.run(follower.stop())
    assert loop.run(tasks()) <= before, "nothing of it goes on"


async def tasks() -> set[str]:
    """What is under way on the loop, by what it runs."""
    return {repr(task.get_coro()) for task in asyncio.all_tasks() if "Periodic" in repr(task.get_coro())}
