"""Timeouts of collectives on a group that behaves as those of nccl and hccl do: its `wait` neither blocks nor raises.

What the fakes do is what torch 2.13 and torch_npu document: work is done some time after `wait` has returned, or never,
until the group is aborted; the first collective makes the connections, and blocks for as long as a member is missing.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from async_rl.errors import PublishError
from async_rl.shared.weights import collectives
from async_rl.shared.weights import stream as weight_stream
from async_rl.shared.weights.collectives import Collectives, TimedOut
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.in_flight import MAX_IN_FLIGHT
from async_rl.shared.weights.store import StoreServer, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup

TIMEOUT_S = 1.0
SOON_S = 60.0
"""Far below a hang, far above what a loaded machine takes."""


class FakeWork:
    def __init__(self, finish: Callable[[], None] | None, delay_s: float = 0.0) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        if finish is not None:
            threading.Timer(delay_s, lambda: (finish(), self.done.set())).start()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self.error


class FakeGroup:
    """`alive`: how many broadcasts end; every later one hangs. `connects`: whether the first one returns at all."""

    def __init__(self, alive: int = 0, connects: bool = True, source: torch.Tensor | None = None) -> None:
        self.alive = alive
        self.connects = connects
        self.source = source
        self.started: list[FakeWork] = []
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        if not self.connects:
            self.aborted.wait()
            raise RuntimeError("aborted")
        (data,) = tensors
        is_alive = len(self.started) < self.alive
        work = FakeWork((lambda: self.fill(data)) if is_alive else None, delay_s=0.02)
        self.started.append(work)
        return work

    def fill(self, data: torch.Tensor) -> None:
        if self.source is not None:
            data.copy_(self.source)

    def abort(self) -> None:
        for work in self.started:
            work.error = RuntimeError("the communicator was aborted")
            work.done.set()
        self.aborted.set()

    def shutdown(self) -> None:
        """As ncclCommDestroy may, it waits for peers, which wait to be invited."""
        self.aborted.wait()


class FakeHcclGroup(FakeGroup):
    """What torch_npu's group inherits from torch is no abort of its own."""

    def abort(self) -> None:
        raise RuntimeError("backend hccl does not support abort")

    def abort_hccl_comm(self, reason: str) -> None:
        super().abort()


def on(group: FakeGroup, timeout_s: float = TIMEOUT_S, has_ended: Callable[[], bool] = lambda: False) -> Collectives:
    return Collectives(group, torch.device("cpu"), timeout_s, has_ended)


@pytest.fixture
def weight_group(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGroup], WeightGroup]:

    def make(group: FakeGroup) -> WeightGroup:
        monkeypatch.setattr(weight_stream, "open_collectives", lambda *_: on(group))
        monkeypatch.setattr(weight_stream, "current_device", lambda _: torch.device("cpu"))
        store = StoreServer("127.0.0.1", ["s" * 32]).store(TIMEOUT_S)
        store.set("present/1", "as if the other had come")
        return WeightGroup(store, 0, 2, "nccl", TIMEOUT_S)

    return make


def tensors(number: int) -> list[tuple[TensorSpec, torch.Tensor]]:
    return [(TensorSpec(f"t{i}", "float32", (4,)), torch.ones(4)) for i in range(number)]


@pytest.mark.parametrize("kind", [FakeGroup, FakeHcclGroup])
def test_a_receiver_that_dies_in_a_broadcast_ends_it_in_a_named_error(
    weight_group: Callable[[FakeGroup], WeightGroup], kind: type[FakeGroup]
) -> None:
    group = kind(alive=3)
    started = time.monotonic()
    with pytest.raises(PublishError, match=r"the weight broadcast broke after .* did not end within 1 s"):
        weight_group(group).send(tensors(20), 16)
    assert time.monotonic() - started < SOON_S
    assert group.aborted.is_set() and len(group.started) <= 3 + MAX_IN_FLIGHT, "nothing was sent after the loss"


def test_a_sender_that_dies_ends_the_receiver_in_a_named_error(
    weight_group: Callable[[FakeGroup], WeightGroup],
) -> None:
    group = FakeGroup(alive=2)
    received = weight_group(group).receive([spec for spec, _ in tensors(20)], 16)
    started = time.monotonic()
    with pytest.raises(PublishError, match="the weight broadcast broke"):
        list(received)
    assert time.monotonic() - started < SOON_S and group.aborted.is_set()


def test_nothing_is_read_before_it_has_arrived(weight_group: Callable[[FakeGroup], WeightGroup]) -> None:
    source = torch.full((4,), 7.0).view(torch.uint8)
    group = FakeGroup(alive=5, source=source)
    received = weight_group(group).receive([spec for spec, _ in tensors(5)], 16)
    assert [tensor.tolist() for _, tensor in received] == [[7.0] * 4] * 5
    assert not group.aborted.is_set()


def test_a_member_that_never_connects_ends_the_meeting_in_time() -> None:
    group = FakeGroup(connects=False)
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"not all members connected within 1 s"):
        on(group).connect()
    assert time.monotonic() - started < SOON_S and group.aborted.is_set()
    on(FakeGroup(alive=1)).connect()


def test_a_receiver_notices_at_once_that_the_sender_has_left() -> None:
    """Whether it is connecting, or waits for a message; no timeout has to pass, after which it would count as lost."""
    server = StoreServer("127.0.0.1", ["s" * 32])
    store = join_rendezvous("127.0.0.1", server.port, "s" * 32, TIMEOUT_S)
    group, connecting = FakeGroup(), FakeGroup(connects=False)
    members = on(group, 10 * SOON_S, store.has_ended)
    threading.Timer(0.2, server.close).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="ended by its host"):
        members.wait(members.broadcast(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="ended by its host"):
        on(connecting, 10 * SOON_S, store.has_ended).connect()
    assert time.monotonic() - started < SOON_S
    assert group.aborted.is_set() and connecting.aborted.is_set()


def test_work_that_failed_is_an_error_though_it_counts_as_completed() -> None:
    group = FakeGroup()
    members = on(group)
    work = members.broadcast(torch.zeros(1))
    work.error = RuntimeError("remote process exited")
    work.done.set()
    with pytest.raises(RuntimeError, match="remote process exited"):
        members.wait(work)
    assert group.aborted.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        members.broadcast(torch.zeros(1))


def test_an_abort_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ABORT_TIMEOUT_S", 0.1)
    group = FakeGroup()
    never = threading.Event()
    monkeypatch.setattr(group, "abort", never.wait)
    members = on(group)
    started = time.monotonic()
    with pytest.raises(TimedOut):
        members.wait(members.broadcast(torch.zeros(1)))
    assert time.monotonic() - started < SOON_S
    never.set()


@pytest.mark.parametrize("kind", [FakeGroup, FakeHcclGroup])
def test_closing_waits_for_no_peer(kind: type[FakeGroup]) -> None:
    group = kind(alive=1)
    members = on(group)
    members.connect()
    closing = threading.Thread(target=members.close, daemon=True)
    closing.start()
    closing.join(SOON_S)
    is_closed = not closing.is_alive()
    group.aborted.set()
    assert is_closed, "it waits for the peers' own close"
    members.close()


def test_closing_an_hccl_or_nccl_group_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ABORT_TIMEOUT_S", 0.1)
    group, never = FakeGroup(), threading.Event()
    monkeypatch.setattr(group, "abort", never.wait)
    started = time.monotonic()
    on(group).close()
    assert time.monotonic() - started < SOON_S
    never.set()
