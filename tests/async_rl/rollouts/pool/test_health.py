"""What the watch of a pool makes of instances that say one thing and do another, and how long it waits."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConnectionLost, InstanceError, InstanceRefused, InstanceUnreachable, NoInstanceLeft
from async_rl.rollouts.instance.client import HeldWeights
from async_rl.rollouts.pool.health import (
    CHECKS_PER_S,
    INTERVAL_S,
    INTERVAL_WITHOUT_S,
    RECHECK_S,
    SILENT_LIMIT_S,
    HealthWatch,
)
from async_rl.rollouts.pool.late_joiners import LateJoiners
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import Roster
from tests.support import virtual_time

URL = "http://a:1"
CONFIG = PoolSection(instances=(URL,), timeout_s=120.0)
PROBE_S = 5.0


class Watched:
    """What the watch calls of an instance's client; `fault` is what its health checks end in."""

    def __init__(self) -> None:
        self.url = URL
        self.fault: Callable[[], InstanceError] | None = None
        self.checks_s: list[float] = []

    async def health(self, timeout_s: float) -> str:
        self.checks_s.append(time.monotonic())
        if self.fault is None:
            return "boot"
        error = self.fault()
        if not isinstance(error, ConnectionLost | InstanceRefused):
            await asyncio.sleep(timeout_s)
        raise error

    async def learn_dialect(self, timeout_s: float) -> None:
        return

    async def max_model_len(self, timeout_s: float) -> int:
        return 100

    async def holding(self, timeout_s: float) -> HeldWeights:
        return HeldWeights("v1", "boot")


def watched(
    scenario: Callable[[Roster, Member, Watched], Coroutine[Any, Any, None]], others: Sequence[Watched] = ()
) -> None:
    """Runs a scenario beside the watch of a pool of one instance, in service with v1, and of others."""

    async def run() -> None:
        roster, client = Roster(CONFIG, None), Watched()
        member = roster.add(URL)
        member.client = client  # type: ignore[assignment]
        for number, other in enumerate(others):
            roster.add(f"http://b:{1 + number}").client = other  # type: ignore[assignment]
        members = [each.entry for each in roster.members]
        roster._membership.end_publish("v1", members, {each.url: "boot" for each in members})
        watch = HealthWatch(roster, LateJoiners(roster), CONFIG)
        watch.start()
        await asyncio.sleep(60.0)
        assert member.state == "ready"
        await scenario(roster, member, client)
        await watch.stop()

    virtual_time.run(run())


async def until(state: str, member: Member, meanwhile: Callable[[], object] = lambda: None) -> float:
    """How long it takes until the member has this state."""
    begun_s = time.monotonic()
    while member.state != state:
        assert time.monotonic() - begun_s < 3600.0
        meanwhile()
        await asyncio.sleep(0.05)
    return time.monotonic() - begun_s


def hangs() -> InstanceError:
    return InstanceUnreachable("no answer in time")


def test_an_instance_that_only_sends_heartbeats_is_given_up() -> None:
    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        client.fault = hangs
        silent_s = await until("dead", member, lambda: roster.register(URL, member.name, "boot"))
        assert SILENT_LIMIT_S - INTERVAL_S < silent_s < SILENT_LIMIT_S + INTERVAL_S + PROBE_S
        assert "silent for" in (member.reason or "")
        client.fault = None
        assert await until("ready", member) < PROBE_S + 2 * INTERVAL_S

    watched(scenario)


def test_one_that_is_silent_for_less_than_the_timeout_stays() -> None:
    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        for _ in range(20):
            client.fault = hangs
            await asyncio.sleep(SILENT_LIMIT_S - PROBE_S - INTERVAL_S)
            client.fault = None
            await asyncio.sleep(PROBE_S + INTERVAL_S)
            assert member.state == "ready"

    watched(scenario)


def test_one_that_answers_with_errors_leaves_after_the_same_time() -> None:
    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        client.fault = lambda: InstanceRefused("engine is broken", 503)
        unwell_s = await until("stale", member)
        assert SILENT_LIMIT_S - INTERVAL_S < unwell_s < SILENT_LIMIT_S + 2 * INTERVAL_S

    watched(scenario)


def test_a_lost_connection_is_checked_twice_before_the_instance_counts_as_lost() -> None:
    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        client.fault = lambda: ConnectionLost("reset")
        num_before = len(client.checks_s)
        member.suspicion.set()
        assert await until("dead", member) < RECHECK_S + 0.1
        first_s, second_s = client.checks_s[num_before : num_before + 2]
        assert second_s - first_s == pytest.approx(RECHECK_S)

    watched(scenario)


def test_requests_wait_for_an_instance_for_as_long_as_the_pools_timeout() -> None:
    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        client.fault = lambda: ConnectionLost("refused")
        member.suspicion.set()
        await until("dead", member)
        begun_s = time.monotonic()
        with pytest.raises(NoInstanceLeft, match="no instance has served weight version 'v1' for 120 s"):
            await roster.router.acquire(1, 1.0, "v1")
        assert time.monotonic() - begun_s < CONFIG.timeout_s + 3 * INTERVAL_WITHOUT_S

    watched(scenario)


def test_many_are_checked_less_often_and_one_by_one_and_a_silent_one_is_given_up_all_the_same() -> None:
    others = [Watched() for _ in range(400)]

    async def scenario(roster: Roster, member: Member, client: Watched) -> None:
        checks_s = sorted(each_s for other in others for each_s in other.checks_s)
        assert len(checks_s) == pytest.approx(60.0 * CHECKS_PER_S, rel=0.1)
        at_once = max(sum(begin_s <= each_s < begin_s + 0.1 for each_s in checks_s) for begin_s in checks_s[::50])
        assert at_once <= 0.2 * CHECKS_PER_S
        client.fault = hangs
        assert await until("dead", member) < SILENT_LIMIT_S + len(others) / CHECKS_PER_S + 2 * PROBE_S

    watched(scenario, others)
