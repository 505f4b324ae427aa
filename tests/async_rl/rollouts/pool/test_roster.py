"""The facts about instances and what follows from each; nothing is asked over the network."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import (
    BrokenAnswer,
    ConfigError,
    ConnectionLost,
    InstanceError,
    InstanceRefused,
    InstanceRestarted,
    InstanceStalled,
    InstanceTooSlow,
    StaleWeights,
    UnknownInstance,
)
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import GroupRequest, Member
from async_rl.rollouts.pool.roster import ALIVE_S, MAX_DESCRIBED, Roster

A, B, C, D = "http://a:1", "http://b:2", "http://c:3", "http://d:4"


class Task:
    """Stands for the task of a request, which nothing runs here."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def roster(monkeypatch: pytest.MonkeyPatch) -> Roster:
    made = Roster(PoolSection(instances=(A,)), None)
    # Wakes need a running loop, and wake nobody here.
    monkeypatch.setattr(made.router, "wake", lambda: None)
    return made


def serving(roster: Roster, url: str = A, boot_id: str | None = "boot-1") -> Member:
    member = roster.add(url)
    roster._membership.end_publish("v1", [each.entry for each in roster.members], {url: boot_id})
    return member


def under_way(member: Member) -> Task:
    request = GroupRequest([PartialRollout(0)], 1)
    task: Any = Task()
    request.task = task
    member.begin(request)
    return task  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a:1", "http://", "http://a:1/path", "http://[:]:1", "", "http://a:70000"]
)
def test_what_is_no_base_url_is_refused(roster: Roster, url: str) -> None:
    with pytest.raises(ConfigError, match="is not a base URL of an instance, expected http://host:port"):
        roster.add(url)
    assert not roster.members


def test_a_url_and_a_name_belong_to_one_instance(roster: Roster) -> None:
    first = roster.add(A + "/", "one")
    assert (first.url, first.name, roster.add(B).name) == (A, "one", "b:2")
    with pytest.raises(ConfigError, match=f"has an instance at {A} twice: as 'one' already"):
        roster.add(A, "other")
    with pytest.raises(ConfigError, match=f"an instance called 'one' already, at {A}: choose another name"):
        roster.add("http://c:3", "one")
    assert roster.find("one") is roster.find(A) is first
    with pytest.raises(UnknownInstance, match="no instance 'c': it has one, b:2"):
        roster.find("c")


def test_one_that_was_listed_may_register_and_gets_its_own_name(roster: Roster) -> None:
    listed = serving(roster)
    assert roster.register(A, "mine", "boot-1") is listed
    assert (listed.name, listed.state) == ("mine", "ready")


@pytest.mark.parametrize("how", ["removed when listed", "removed when registered"])
def test_one_that_was_removed_is_told_to_leave_and_a_later_process_may_come(roster: Roster, how: str) -> None:
    if how == "removed when listed":
        name = serving(roster).name
    else:
        name = "mine"
        roster.register(A, name, "boot-1")
    roster.remove(A)
    for _ in range(3):
        assert roster.register(A, name, "boot-1") is None
    assert not roster.members
    late = roster.register(A, name, "boot-2")
    assert late is not None and late.state == "joining" and roster.members == (late,)


def test_a_new_process_under_a_known_url_replaces_the_old_one_and_ends_its_requests(roster: Roster) -> None:
    old = roster.register(A, "mine", "boot-1")
    assert old is not None
    task = under_way(old)
    assert roster.register(A, "mine", "boot-1") is old and not task.is_cancelled
    new = roster.register(A, "mine", "boot-2")
    assert roster.members == (new,) and new is not old
    assert task.is_cancelled and old.state == "gone" and "was started anew" in (old.reason or "")


@pytest.mark.parametrize(("silent_s", "is_taken"), [(0.0, False), (ALIVE_S - 1.0, False), (ALIVE_S + 1.0, True)])
def test_a_name_is_taken_over_only_from_one_that_does_not_answer(
    roster: Roster, silent_s: float, is_taken: bool
) -> None:
    owner = roster.register(A, "mine", "boot-1")
    assert owner is not None
    owner.last_seen_s = time.monotonic() - silent_s
    if not is_taken:
        with pytest.raises(ConfigError, match=f"called 'mine' already, which answers at {A}: choose another --name"):
            roster.register(B, "mine", "boot-2")
        assert roster.members == (owner,)
        return
    member = roster.register(B, "mine", "boot-2")
    assert roster.members == (member,) and owner.state == "gone"


Act = Callable[[Roster, Member], object]
FACTS: dict[str, tuple[Act, str, bool]] = {
    "drained": (lambda roster, member: roster.drain(member.name), "draining", False),
    "removed": (lambda roster, member: roster.remove(member.url), "gone", True),
    "lost": (lambda roster, member: roster.note_lost(member, "silent"), "dead", True),
    "unwell": (lambda roster, member: roster.note_unwell(member, "503"), "stale", False),
    "failed": (lambda roster, member: roster.note_failure(member, "it said v0"), "stale", False),
    "restarted": (lambda roster, member: roster.note_process(member, "boot-2"), "joining", True),
    "same process": (lambda roster, member: roster.note_process(member, "boot-1"), "ready", False),
    "holds another": (lambda roster, member: roster.note_answer(member, "v0", "boot-1"), "ready", False),
}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_ends_requests_where_they_cannot_come_to_an_end(roster: Roster, fact: str) -> None:
    act, state, ends_requests = FACTS[fact]
    member = serving(roster)
    task = under_way(member)
    act(roster, member)
    assert (member.state, task.is_cancelled) == (state, ends_requests)


FAILURES: list[tuple[InstanceError, str, bool, bool]] = [
    (InstanceTooSlow("slow"), "ready", True, False),
    (InstanceError("unfinished"), "ready", False, False),
    (InstanceRefused("busy", 503), "ready", False, False),
    (ConnectionLost("reset"), "ready", False, True),
    (InstanceStalled("no tokens"), "dead", True, False),
    (StaleWeights("v0"), "stale", True, False),
    (BrokenAnswer("flood"), "stale", True, False),
    (InstanceRefused("no such route", 404), "stale", True, False),
    (InstanceRestarted("anew", "boot-2"), "joining", True, False),
]


@pytest.mark.parametrize(("error", "state", "is_closed", "is_suspect"), FAILURES, ids=lambda each: f"{each!r}")
def test_a_failed_request_costs_a_pause_or_its_service(
    roster: Roster, error: InstanceError, state: str, is_closed: bool, is_suspect: bool
) -> None:
    member = serving(roster)
    roster.request_failed(member, time.monotonic(), error)
    assert (member.state, member.circuit.is_closed, member.suspicion.is_set()) == (state, is_closed, is_suspect)
    assert member.takes("v1") == (state == "ready" and is_closed)


def test_a_pause_does_not_reach_one_that_is_out_of_service(roster: Roster) -> None:
    member = roster.add(A)
    roster.request_failed(member, time.monotonic(), ConnectionLost("reset"))
    assert member.circuit.is_closed and not member.suspicion.is_set()


def test_one_that_returns_is_tried_as_if_nothing_had_been(roster: Roster) -> None:
    member = serving(roster)
    roster.request_failed(member, time.monotonic(), ConnectionLost("reset"))
    roster.note_lost(member, "silent")
    roster.note_answer(member, "v1", "boot-1")
    assert member.takes("v1") and member.circuit.is_closed


def test_why_no_instance_helps_is_told_of_each(roster: Roster) -> None:
    assert roster.describe("nobody") == "nobody: the pool is empty"
    roster.note_lost(serving(roster), "silent")
    roster.add(B)
    assert (
        roster.describe("nobody") == f"nobody:\n  {A}: silent\n  {B}: it has not received any weights of this run yet"
    )
    for number in range(1000):
        roster.add(f"http://c:{1 + number}")
    told = roster.describe("nobody").splitlines()
    assert len(told) == 1 + MAX_DESCRIBED + 1 and told[-1] == f"  and {1002 - MAX_DESCRIBED} more"


def test_a_process_whose_place_was_taken_is_told_to_leave_when_it_returns(roster: Roster) -> None:
    """It was cut off, and another one was started under its name, elsewhere or at its address."""
    roster.register(A, "mine", "boot-1")
    second = roster.register(B, "mine", "boot-2")
    for _ in range(3):
        assert roster.register(A, "mine", "boot-1") is None
    assert roster.members == (second,)
    third = roster.register(B, "mine", "boot-3")
    assert roster.register(B, "mine", "boot-2") is None
    assert roster.register(B, "mine", "boot-3") is third and roster.members == (third,)


def test_an_instance_that_a_publish_refuses_at_once_is_logged_with_the_reason(
    roster: Roster, caplog: pytest.LogCaptureFixture
) -> None:
    late = roster.add(B)
    roster.publish_failed(late, "start it with --exact")
    assert f"{B} does not get into service: start it with --exact" in caplog.text
    caplog.clear()
    roster.publish_failed(serving(roster), "its log-probs differ")
    assert "leaves service" in caplog.text and "does not get into" not in caplog.text


def test_one_process_under_two_addresses_gets_one_publish() -> None:
    async def scenario() -> None:
        pool = InferencePool(PoolSection(instances=(A, B, C, D)))
        first, second, third, fourth = pool.members
        for member, boot_id in ((first, "boot-1"), (second, "boot-1"), (third, "started-7"), (fourth, "started-7")):
            pool.note_process(member, boot_id)
        assert await pool.begin_publish() == [first, third, fourth]
        assert second.reason == f"it is the same process as {A}: name one of the addresses"
        pool.note_lost(first, "silent")
        assert await pool.begin_publish() == [first, second, third, fourth]
        await pool.close()

    asyncio.run(scenario())
