"""One try to move a stream: who receives it, who is dropped and for what, and when a new group is formed.

Each instance is a thread that joins a real weight group over loopback.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from async_rl.config.pool_section import PublishSection
from async_rl.errors import InstanceError, InstanceUnreachable, LeaderFailed, PublishError, WeightGroupBroken
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.membership import Membership
from async_rl.rollouts.publish.broadcast import Broadcast
from async_rl.rollouts.publish.instance_update import announcement
from async_rl.rollouts.publish.publisher import _may_pass
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights import rendezvous, sender
from async_rl.shared.weights.fingerprint import MakeStream, TensorSpec
from async_rl.shared.weights.pulse import Pulse
from async_rl.shared.weights.rendezvous import Rendezvous
from async_rl.shared.weights.sender import WeightSender, WeightSource
from async_rl.shared.weights.stream import WeightGroup
from tests.support.publishing import SPECS, TENSORS, remote, stream
from tests.support.receiving_client import ReceivingClient, receiving_member

ALL_RECEIVED = {name: tensor.double().sum().item() for name, tensor in TENSORS.items()}


def client(member: Member) -> ReceivingClient:
    found: Any = member.client
    assert isinstance(found, ReceivingClient)
    return found


def received(member: Member) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in client(member).received.items()}


class Moves:
    """A broadcast that notes whom it dropped."""

    def __init__(
        self, loop: EventLoopThread, members: list[Member], is_remote: bool, backend: str = "sockets", **settings: Any
    ) -> None:
        self.members = members
        self.dropped: dict[Member, InstanceError] = {}
        self._make_stream: MakeStream = stream
        config = PublishSection(**({"timeout_s": 5.0} | settings))
        self._sender = WeightSender(WeightSource(SPECS, lambda: self._make_stream()), config, "run", backend)
        self._info = announcement(self._sender.facts(), "whole")
        self._broadcast = Broadcast(loop, config, remote(self._sender) if is_remote else self._sender, self._drop)

    def _drop(self, failures: Mapping[Member, InstanceError]) -> None:
        self.dropped |= failures

    def move(self, scale: float = 1.0, make_stream: MakeStream | None = None) -> str | None:
        self._make_stream = make_stream or (lambda: stream(scale))
        staying = [member for member in self.members if member not in self.dropped]
        sent = self._broadcast.move(staying, self._info, "v1")
        return None if sent is None else sent.fingerprint

    def close(self) -> None:
        self._sender.close()
        for member in self.members:
            client(member).close()


@pytest.fixture(params=["in this process", "through a connection", "through mapped memory"])
def moves(loop: EventLoopThread, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Moves] = []

    def make(*faults: str | None, **settings: Any) -> Moves:
        members = [receiving_member(str(9000 + i), fault) for i, fault in enumerate(faults)]
        if request.param == "through mapped memory":
            settings = {"transport": "ipc"} | settings
        made.append(Moves(loop, members, request.param == "through a connection", **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_all_receive_the_stream_and_the_group_is_kept_for_the_same_instances(moves: Any) -> None:
    one = moves(None, None)
    first = one.move()
    assert first is not None and [received(member) for member in one.members] == [ALL_RECEIVED] * 2
    assert one.move() == first and one.move(2.0) not in (first, None)
    assert received(one.members[1])["head.weight"] == 2 * ALL_RECEIVED["head.weight"]
    assert [client(member).num_joins for member in one.members] == [1, 1] and not one.dropped


def test_another_set_or_one_that_is_not_in_service_forms_a_group_anew(moves: Any) -> None:
    one = moves(None, None)
    fingerprint = one.move()
    one.dropped[one.members[1]] = InstanceError("it left")
    assert one.move() == fingerprint
    one.dropped.clear()
    assert one.move() == fingerprint
    assert [client(member).num_joins for member in one.members] == [3, 2]
    Membership().lost(one.members[1].entry, "it may have been started again")
    assert one.move() == fingerprint
    assert [client(member).num_joins for member in one.members] == [4, 3]


@pytest.mark.parametrize("fault", ["world_size", "init", "pause", "update"])
@pytest.mark.parametrize("at", [0, 1])
def test_one_that_refuses_a_step_is_dropped_alone_at_once_and_the_next_try_succeeds(
    moves: Any, fault: str, at: int
) -> None:
    faults: list[str | None] = [None, None]
    faults[at] = fault
    one = moves(*faults, timeout_s=60.0)
    begun = time.monotonic()
    assert one.move() is None
    assert time.monotonic() - begun < 30.0, "nobody waits for the timeout"
    ((member, error),) = one.dropped.items()
    assert member is one.members[at] and f"refuses {fault}" in str(error)
    assert one.move() is not None and received(one.members[1 - at]) == ALL_RECEIVED


OURS = "2.29.7 (torch 2.13.0)"


@pytest.fixture
def over_nccl(moves: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Moves]:
    """A sender that takes its backend for nccl, and connects over sockets; instances report these versions."""
    monkeypatch.setattr(sender, "nccl_version", lambda: OURS)
    monkeypatch.setattr(sender, "Rendezvous", lambda *given, **rest: Rendezvous(*given[:-1], "sockets", **rest))

    def make(*reports: list[str]) -> Moves:
        one: Moves = moves(*[None] * len(reports), timeout_s=60.0, backend="nccl", transport="broadcast")
        for member, report in zip(one.members, reports, strict=True):
            client(member).nccl = report
        return one

    return make


def test_one_with_another_nccl_is_refused_by_name_before_any_is_invited(over_nccl: Callable[..., Moves]) -> None:
    one = over_nccl([OURS, OURS], [OURS, "2.30.7 (torch 2.14.0)"], [])
    assert one.move() is None and not any(client(member).num_joins for member in one.members)
    ((member, error),) = one.dropped.items()
    assert member is one.members[1] and not _may_pass(error)
    for part in ("2.30.7 (torch 2.14.0)", OURS, "torch 2.13.0 with vLLM 0.32.0", "vLLM 0.33.0"):
        assert part in str(error)
    assert one.move() is not None, "one that reports nothing is let through"


def test_the_same_nccl_of_another_torch_is_invited(over_nccl: Callable[..., Moves]) -> None:
    one = over_nccl(["2.29.7 (torch 2.13.1)"])
    assert one.move() is not None and not one.dropped


def test_a_trainer_without_nccl_compares_nothing(
    over_nccl: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "nccl_version", lambda: "none (torch 2.13.0+cpu)")
    one = over_nccl(["2.30.7 (torch 2.14.0)"])
    assert one.move() is not None and not one.dropped


@pytest.mark.parametrize("text", ["ncclInvalidUsage: This usually", "Mismatched NCCL version detected"])
def test_what_nccl_refuses_is_not_worth_another_try(
    text: str, over_nccl: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PublishError(f"not all members met: {text}")

    one = over_nccl([], [])
    monkeypatch.setattr(rendezvous, "WeightGroup", type("Refusing", (WeightGroup,), {"__init__": refuse}))
    assert one.move() is None
    assert set(one.dropped) == set(one.members)
    assert all(text in str(error) and not _may_pass(error) for error in one.dropped.values())


def test_one_that_refuses_to_start_an_update_may_still_receive(moves: Any) -> None:
    """An update that an earlier trainer left open goes on: the stream carries every tensor."""
    one = moves("start")
    assert one.move() is not None and received(one.members[0]) == ALL_RECEIVED and not one.dropped


def test_one_that_accepts_nothing_within_the_timeout_is_named_and_dropped(moves: Any) -> None:
    one = moves(None, "hang", timeout_s=1.0)
    assert one.move() is None
    ((member, error),) = one.dropped.items()
    assert member is one.members[1] and isinstance(error, InstanceUnreachable)
    assert "did not accept the list of tensors within 1 s (publish.timeout_s)" in str(error)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_that_comes_too_late_to_the_rendezvous_is_dropped_alone(moves: Any, at: int) -> None:
    """As one does that is still busy with an invitation which the network had held back."""
    faults: list[str | None] = [None, None, None]
    faults[at] = "late"
    one = moves(*faults, timeout_s=1.0)
    assert one.move() is None
    ((member, error),) = one.dropped.items()
    assert member is one.members[at] and isinstance(error, WeightGroupBroken)
    assert one.move() is not None
    assert [received(each) for each in one.members if each is not member] == [ALL_RECEIVED] * 2


@pytest.mark.parametrize("faults", [["break", None, None], ["break", "break"], ["break"]])
def test_one_that_is_lost_in_the_rendezvous_breaks_it_and_may_come_again(moves: Any, faults: list[Any]) -> None:
    one = moves(*faults, timeout_s=60.0)
    begun = time.monotonic()
    assert one.move() is None
    assert time.monotonic() - begun < 30.0, "nobody waits for the timeout"
    assert one.dropped and all(isinstance(error, WeightGroupBroken) for error in one.dropped.values())
    assert {client(member).fault for member in one.dropped} == {"break"}
    for member in one.members:
        client(member).fault = None
    one.dropped.clear()
    assert one.move() is not None
    assert [received(member) for member in one.members] == [ALL_RECEIVED] * len(faults)


@pytest.mark.parametrize("at", [0, 1])
def test_one_that_others_cannot_connect_to_is_the_last_of_the_chain_and_nobody_is_dropped(
    moves: Any, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[str | None] = [None, None, None]
    faults[at] = "unreachable"
    one = moves(*faults, timeout_s=6.0, transport="broadcast")
    assert one.move() is None and not one.dropped
    assert f"not all instances reach {one.members[at].url}: from now on" in caplog.text
    assert one.move() is not None and not one.dropped
    assert [received(member) for member in one.members] == [ALL_RECEIVED] * 3


def test_of_two_that_others_cannot_connect_to_one_is_dropped(moves: Any) -> None:
    one = moves("unreachable", "unreachable", None, timeout_s=6.0, transport="broadcast")
    # Both are noticed in the first try, or one after the other.
    assert any(one.move() is not None for _ in range(4))
    ((member, error),) = one.dropped.items()
    assert member in one.members[:2] and "no connection to rank 2 at 127.0.0.1:1" in str(error)
    assert [received(each) for each in one.members if each is not member] == [ALL_RECEIVED] * 2


def test_one_whose_loss_the_sender_sees_before_its_call_fails_is_dropped_alone(moves: Any) -> None:
    one = moves("slow", "break unseen", "slow", timeout_s=60.0)
    begun = time.monotonic()
    assert one.move() is None
    assert time.monotonic() - begun < 30.0, "nobody waits for the timeout"
    ((member, error),) = one.dropped.items()
    assert member is one.members[1] and isinstance(error, WeightGroupBroken)


def test_of_several_that_failed_before_the_sender_looked_the_first_is_blamed(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with whom it was about to connect, or who came for the sender's memory after the end, fail as well."""
    wait = Rendezvous.wait

    def wait_late(self: Rendezvous, timeout_s: float) -> bool:
        time.sleep(1.0)
        return wait(self, timeout_s)

    one = moves("slow", "break", "slow", timeout_s=60.0)
    with monkeypatch.context() as patch:
        patch.setattr(Rendezvous, "wait", wait_late)
        assert one.move() is None
    assert list(one.dropped) == [one.members[1]]
    for member in one.members:
        client(member).fault = None
    assert one.move() is not None


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_that_leaves_amid_the_stream_is_blamed_and_not_those_whose_connections_it_broke(
    moves: Any, at: int
) -> None:
    """Also the last one, to which the sender itself sends nothing."""
    faults: list[str | None] = [None, None, None]
    faults[at] = "leave"
    one = moves(*faults, timeout_s=60.0)
    begun = time.monotonic()
    assert one.move() is None
    assert time.monotonic() - begun < 30.0, "nobody waits for the timeout"
    ((member, error),) = one.dropped.items()
    assert member is one.members[at] and "is gone" in str(error)
    assert one.move() is not None
    assert [received(each) for each in one.members if each is not member] == [ALL_RECEIVED] * 2


def test_those_that_reject_what_they_received_are_dropped_together_and_the_others_have_it(moves: Any) -> None:
    one = moves("reject", None, "reject")
    assert one.move() is not None and received(one.members[1]) == ALL_RECEIVED
    assert set(one.dropped) == {one.members[0], one.members[2]}
    assert all(type(error) is InstanceError and "does not take" in str(error) for error in one.dropped.values())


def test_an_error_of_the_stream_itself_ends_the_wait_of_all_and_the_next_move_works(moves: Any) -> None:
    one = moves(None, None)

    def broken() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield next(stream())
        raise RuntimeError("the shard cannot be read")

    with pytest.raises((RuntimeError, LeaderFailed), match="the shard cannot be read"):
        one.move(make_stream=broken)
    assert not one.dropped
    assert one.move() is not None and [client(member).num_joins for member in one.members] == [2, 2]


def slow(timeout_s: float) -> MakeStream:
    def make_stream() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for number, part in enumerate(stream()):
            # A receiver of mapped memory waits for two timeouts.
            time.sleep(2.5 * timeout_s if number == 1 else 0.0)
            yield part

    return make_stream


def test_a_sender_that_stands_still_has_nobody_left_out_and_ends_the_publish_the_second_time(moves: Any) -> None:
    one = moves(None, None, None, timeout_s=0.8)
    assert one.move() is not None
    assert one.move(make_stream=slow(0.8)) is None and not one.dropped
    assert one.move() is not None and [received(member) for member in one.members] == [ALL_RECEIVED] * 3
    assert one.move(make_stream=slow(0.8)) is None and not one.dropped
    with pytest.raises(
        (PublishError, LeaderFailed), match="broke twice because the trainer did nothing for it: it stood"
    ):
        one.move(make_stream=slow(0.8))


def test_where_nobody_says_that_it_stood_still_all_are_tried_again_and_then_one_is_left_out(
    moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of mapped memory, where no member waits for another, the sender names one at once."""
    monkeypatch.setattr(Pulse, "said", lambda _: "")
    one = moves(None, None, None, timeout_s=0.8, transport="broadcast")
    assert one.move() is not None
    assert one.move(make_stream=slow(0.8)) is None and not one.dropped
    assert one.move(make_stream=slow(0.8)) is None and len(one.dropped) == 1


def test_an_address_without_a_route_is_dropped_before_anybody_is_invited(moves: Any) -> None:
    one = moves(None, None)
    one.members[0].entry.url = "http://no-such-host.invalid:1"
    assert one.move() is None
    ((member, error),) = one.dropped.items()
    assert member is one.members[0] and "no route leads to it" in str(error)
    assert client(one.members[1]).num_joins == 0


def test_an_address_that_is_none_of_this_host_ends_the_publish_with_the_setting(moves: Any) -> None:
    one = moves(None, master_address="192.0.2.1")
    with pytest.raises(PublishError, match=r"192\.0\.2\.1 \(publish\.master_address\)"):
        one.move()
