"""Where a trainer meets its instances, and the rendezvous itself: real groups over loopback, with threads."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from async_rl.config.pool_section import PublishSection
from async_rl.errors import PublishError
from async_rl.shared.protocol.inference import InitInfo
from async_rl.shared.weights import stream
from async_rl.shared.weights.collectives import Collectives
from async_rl.shared.weights.rendezvous import Rendezvous, sender_address
from async_rl.shared.weights.store import join_rendezvous
from async_rl.shared.weights.store_wire import NotInvited
from async_rl.shared.weights.stream import WeightGroup

HOST = "127.0.0.1"
PATIENCE_S = 60.0


def test_the_meeting_is_where_all_instances_reach_it() -> None:
    assert sender_address(None, ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    # An instance on this host reaches the other address too; one elsewhere does not reach loopback.
    assert sender_address(None, ["127.0.0.1", "127.0.0.1", "10.0.0.1"]) == "10.0.0.1"
    assert sender_address(None, ["10.1.0.1", "10.2.0.1", "127.0.0.1", "10.2.0.1"]) == "10.2.0.1"
    assert sender_address(None, ["::1", "fd00::2"]) == "fd00::2"
    assert sender_address(None, ["fe80::1%eth0"]) == "fe80::1%eth0"
    # However many stages there are on a network of the trainer's own.
    assert sender_address(None, ["10.0.0.1", "127.0.0.1"], ["10.2.0.1"] * 3) == "10.0.0.1"
    assert sender_address(None, ["127.0.0.1"], ["127.0.0.1", "10.2.0.1"]) == "10.2.0.1"


def test_a_chosen_address_is_taken_unless_nobody_else_reaches_it() -> None:
    assert sender_address("10.9.9.9", ["10.0.0.1"]) == "10.9.9.9"
    assert sender_address("127.0.0.1", ["127.0.0.1"]) == "127.0.0.1"
    with pytest.raises(PublishError, match=r"master_address = '127\.0\.1\.1' .* begins at 10\.0\.0\.1: leave it out"):
        sender_address("127.0.1.1", ["127.0.0.1", "10.0.0.1"])
    with pytest.raises(PublishError, match="master_address = 'no such host'"):
        sender_address("no such host", ["127.0.0.1"])
    with pytest.raises(PublishError, match=r"master_address = 'trainer\.\.lan'"):
        sender_address("trainer..lan", ["127.0.0.1"])


def meeting_of(*sizes: int, timeout_s: float = PATIENCE_S) -> tuple[Rendezvous, list[InitInfo]]:
    rendezvous = Rendezvous(sizes, HOST, PublishSection(timeout_s=timeout_s), "sockets")
    return rendezvous, rendezvous.invitations()


class Guest:
    """One worker of an instance, in a thread; `group` or `error` once it has ended."""

    def __init__(self, info: InitInfo, place: int = 0, secret: str | None = None, takes_part: bool = True) -> None:
        self._info = info
        self._rank = info.rank_offset + place
        self._secret = secret or info.secret
        self._takes_part = takes_part
        self.group: WeightGroup | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        info = self._info
        try:
            store = join_rendezvous(info.master_address, info.master_port, self._secret, info.timeout_s)
            self.group = WeightGroup(store, self._rank, info.world_size, info.backend, info.timeout_s)
        except PublishError as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


def test_the_sender_meets_on_the_device_of_the_thread_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch has it: each thread has a current device of its own, at first 0.
    chosen = threading.local()
    chosen.index = 3
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(chosen, "index", 0))
    devices: list[torch.device] = []

    def open_collectives(*arguments: Any) -> Collectives:
        devices.append(arguments[-1])
        return Collectives(None, arguments[-1], PATIENCE_S)

    monkeypatch.setattr(stream, "open_collectives", open_collectives)
    rendezvous = Rendezvous([], HOST, PublishSection(timeout_s=PATIENCE_S), "nccl")
    assert rendezvous.wait(PATIENCE_S)
    assert devices == [torch.device("cuda", 3)]
    assert rendezvous.group is not None
    rendezvous.close()


def test_ranks_follow_one_another() -> None:
    for sizes in ([1], [2, 1], [1, 4, 2], [3, 3, 3]):
        rendezvous, invitations = meeting_of(*sizes)
        places = [info.rank_offset + i for info, size in zip(invitations, sizes, strict=True) for i in range(size)]
        assert places == list(range(1, 1 + sum(sizes)))
        assert {info.world_size for info in invitations} == {1 + sum(sizes)}
        rendezvous.call_off(places)


def test_every_instance_has_a_secret_of_its_own_in_each_meeting_which_no_invitation_shows() -> None:
    meetings = [meeting_of(1, 2) for _ in range(3)]
    invitations = [info for _, infos in meetings for info in infos]
    assert len({info.secret for info in invitations}) == 6 and all(len(info.secret) >= 64 for info in invitations)
    assert not any(info.secret in repr(info) for info in invitations)
    for rendezvous, _ in meetings:
        rendezvous.call_off([1, 2, 3])


class Announcement:
    """A member that accepts an update without tensors, in a thread; `error` is why it did not receive it."""

    def __init__(self, group: WeightGroup, rank: int, after_s: float = 0.0) -> None:
        self.error: PublishError | None = None
        self.thread = threading.Timer(after_s, self._announce, [group, rank])
        self.thread.daemon = True
        self.thread.start()

    def _announce(self, group: WeightGroup, rank: int) -> None:
        try:
            group.announce(rank)
            assert not list(group.receive([], 1))
        except PublishError as error:
            self.error = error


def formed(*sizes: int, timeout_s: float = PATIENCE_S) -> tuple[Rendezvous, list[WeightGroup]]:
    """A rendezvous that was held, and the groups of all its members."""
    rendezvous, infos = meeting_of(*sizes, timeout_s=timeout_s)
    guests = [Guest(info, place) for info, size in zip(infos, sizes, strict=True) for place in range(size)]
    assert rendezvous.wait(PATIENCE_S)
    for guest in guests:
        guest.end()
    return rendezvous, [guest.group for guest in guests if guest.group is not None]


def test_a_group_is_formed_and_says_whose_workers_have_not_accepted_an_update() -> None:
    rendezvous, groups = formed(1, 2)
    assert rendezvous.group is not None and rendezvous.problem is None
    assert rendezvous.group.wait_accepted(0.0) == [1, 2, 3]
    members = [Announcement(groups[0], 1), Announcement(groups[1], 2)]
    assert within(PATIENCE_S, lambda: rendezvous.group is not None and rendezvous.group.wait_accepted(0.05) == [3])
    members.append(Announcement(groups[2], 3, after_s=0.05))
    begun = time.monotonic()
    assert rendezvous.group.wait_accepted(PATIENCE_S) == [] and time.monotonic() - begun < PATIENCE_S / 2
    assert all(member.thread.is_alive() for member in members), "nobody receives before the sender sends"
    rendezvous.group.send([], 1)
    for member in members:
        member.thread.join(PATIENCE_S)
        assert member.error is None and not member.thread.is_alive()
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(PublishError, match="the weight broadcast broke"):
        groups[0].announce(1)
    for group in groups:
        group.close()


def test_a_member_that_accepted_outwaits_the_sender_who_says_which_one_did_not() -> None:
    # It failed at the same moment as the sender gave up, and both were taken for broken.
    timeout_s = 3.0
    rendezvous, groups = formed(1, 1, timeout_s=timeout_s)
    assert rendezvous.group is not None
    member = Announcement(groups[0], 1)
    assert within(timeout_s, lambda: rendezvous.group is not None and rendezvous.group.wait_accepted(0.0) == [2])
    assert rendezvous.group.wait_accepted(1.3 * timeout_s) == [2]
    assert member.thread.is_alive() and member.error is None
    rendezvous.close()
    member.thread.join(timeout_s / 2)
    assert "the weight broadcast broke" in str(member.error)
    for group in groups:
        group.close()


def test_a_meeting_that_is_called_off_ends_the_wait_of_those_who_came_at_once() -> None:
    rendezvous, (one, two) = meeting_of(1, 2, timeout_s=60.0)
    assert rendezvous.absent() == [1, 2, 3]
    guest, first_of_two = Guest(one), Guest(two)
    assert not rendezvous.wait(0.2) and rendezvous.problem is None
    assert rendezvous.absent() == [3] and not rendezvous.lost()
    begun = time.monotonic()
    problem = rendezvous.call_off([3])
    guest.end()
    first_of_two.end()
    assert rendezvous.absent() == [3] and rendezvous.problem == problem, "who has gone had come"
    while sorted(rendezvous.lost()) != [1, 2]:
        assert time.monotonic() - begun < 30.0, "their connections have ended"
        time.sleep(0.01)
    assert time.monotonic() - begun < 30.0, "nobody waits for the timeout"
    assert guest.group is None
    assert "was ended by its host" in str(guest.error) or "is gone" in str(guest.error)
    assert rendezvous.wait(0) and rendezvous.group is None and problem


def test_a_group_that_was_formed_while_it_was_called_off_is_none() -> None:
    rendezvous, (one,) = meeting_of(1)
    guest = Guest(one)
    assert rendezvous.wait(PATIENCE_S)
    rendezvous.call_off([])
    assert rendezvous.group is None
    guest.end()
    if guest.group is not None:
        guest.group.close()


def test_nobody_comes_in_with_the_secret_of_another_meeting_and_those_invited_still_meet() -> None:
    rendezvous, (invitation,) = meeting_of(1)
    stranger = Guest(invitation, secret="0" * 64)
    stranger.end()
    assert isinstance(stranger.error, NotInvited) and stranger.group is None
    assert not rendezvous.wait(0)
    guest = Guest(invitation)
    assert rendezvous.wait(PATIENCE_S)
    guest.end()
    assert rendezvous.group is not None
    rendezvous.close()
    assert guest.group is not None
    guest.group.close()


def test_one_that_does_not_come_within_the_timeout_is_no_group_and_the_problem_says_so() -> None:
    rendezvous, _ = meeting_of(1, timeout_s=0.3)
    assert rendezvous.wait(PATIENCE_S) and rendezvous.group is None and rendezvous.absent() == [1]
    assert "not all 2 members of the weight group met within 0.3 s" in str(rendezvous.problem)
