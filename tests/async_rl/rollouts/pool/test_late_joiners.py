"""Who is put in service between two publishes, and on what evidence."""

import asyncio

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import InstanceError
from async_rl.rollouts.instance.client import HeldWeights
from async_rl.rollouts.pool.late_joiners import LateJoiners
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import Roster
from tests.support import virtual_time

A, B = "http://a:1", "http://b:2"


def stage() -> tuple[Roster, LateJoiners, Member]:
    """One instance in service with v1, and one that came later."""
    roster = Roster(PoolSection(instances=(A,)), None)
    first = roster.add(A)
    roster._membership.end_publish("v1", [first.entry], {A: "boot-a"})
    return roster, LateJoiners(roster), roster.add(B)


def holding(member: Member, version: str, boot_id: str | None = "boot-b") -> None:
    async def answer(timeout_s: float) -> HeldWeights:
        return HeldWeights(version, boot_id)

    member.client.holding = answer  # type: ignore[method-assign]


async def nothing_to_do(member: Member) -> None:
    return


@pytest.mark.parametrize("has_way", [True, False])
def test_nobody_joins_without_a_way(has_way: bool) -> None:
    roster, joiners, late = stage()
    joiners.admit = nothing_to_do if has_way else None
    assert joiners.may_admit(late) is has_way
    assert not joiners.may_admit(roster.members[0]), "it serves already"


def test_one_that_holds_the_version_afterwards_serves() -> None:
    _, joiners, late = stage()
    joiners.admit = nothing_to_do
    holding(late, "v1")
    asyncio.run(joiners.admit_now(late))
    assert late.serves("v1") and late.boot_id == "boot-b" and not joiners.may_admit(late)


@pytest.mark.parametrize("fault", ["refuses", "holds another version"])
def test_one_that_fails_is_not_asked_again_before_the_next_publish(fault: str) -> None:
    async def refuse(member: Member) -> None:
        raise InstanceError("no room")

    _, joiners, late = stage()
    joiners.admit = refuse if fault == "refuses" else nothing_to_do
    holding(late, "v0")
    asyncio.run(joiners.admit_now(late))
    assert late.state == "stale" and not joiners.may_admit(late)
    assert late.reason is not None and late.reason.startswith("it could not join: ")


def test_a_publish_waits_for_an_admission_and_one_that_ends_in_it_serves_nothing() -> None:
    async def scenario() -> None:
        roster, joiners, late = stage()
        holding(late, "v1")
        is_let = asyncio.Event()

        async def slow(member: Member) -> None:
            await is_let.wait()

        joiners.admit = slow
        admission = asyncio.create_task(joiners.admit_now(late))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(joiners.wait())
        await asyncio.sleep(600.0)
        assert not waiting.done()
        roster._membership.begin_publish()
        is_let.set()
        await asyncio.gather(admission, waiting)
        assert late.state == "joining", "the version that it was given is in training no more"
        await joiners.wait()

    virtual_time.run(scenario())


def test_an_admission_that_is_called_off_holds_up_no_publish() -> None:
    async def scenario() -> None:
        _, joiners, late = stage()

        async def never(member: Member) -> None:
            await asyncio.Event().wait()

        joiners.admit = never
        admission = asyncio.create_task(joiners.admit_now(late))
        await asyncio.sleep(0)
        admission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admission
        await asyncio.wait_for(joiners.wait(), 5.0)
        assert late.state == "joining"

    virtual_time.run(scenario())
