"""Four instances, of which one stands still in a publish: whoever is left out, it is that one.

A member of a chain waits for its neighbour, who may wait for another one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from async_rl.rollouts.publish import publisher as publisher_module
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.fingerprint import MakeStream, TensorSpec
from async_rl.shared.weights.sender import WeightSource
from tests.support.publishing import Publishing
from tests.support.tiers import at_night
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
SIZE = 4
ROWS = TensorSpec("", "float32", (2, 1024, 1024))
SPECS = [TensorSpec(f"layers.{number}.weight", ROWS.dtype_name, ROWS.shape) for number in range(12)]
"""More than all sockets and messages in flight hold, so that whoever stands still amid the stream holds up the rest."""

PLACES = ("come", "meet", "update", "first", "amid", "busy", "answer", "finish")
LENGTHS = (0.5, 1.0, 1.2, 2.0, None)
"""In timeouts, or for good."""

BY_DAY = [(1, "amid", 1.2), (2, "meet", 1.2), (3, "come", 1.0)]


def stream(scale: float) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for number, spec in enumerate(SPECS):
        yield spec, torch.full(spec.shape, scale + number)


def source(scale: float) -> MakeStream:
    return lambda: stream(scale)


@pytest.fixture
def four(start_receivers_once: Callable[..., list[Any]]) -> list[Any]:
    return start_receivers_once(*[{}] * SIZE)


def require_only(four: list[Any], loop: EventLoopThread, at: int, place: str, length: float | None, backend: str) -> None:
    publishing = Publishing(loop)
    try:
        sends = WeightSource(SPECS, lambda: current())
        publisher, pool = publishing.make(*four, timeout_s=TIMEOUT_S, transport=backend, source=sends, probes=False)
        current = source(0.0)
        if place not in ("come", "meet"):
            assert len(publisher.publish("run-0").instances) == SIZE
        seconds = None if length is None else length * TIMEOUT_S
        four[at].rescript(stall=[place, seconds])
        current = source(5.0)
        urls = publisher.publish("run-1").instances
        others = [instance for number, instance in enumerate(four) if number != at]
        reasons = [member.reason for member in pool.members]
        assert set(urls) >= {instance.url for instance in others}, reasons
        assert [reason for number, reason in enumerate(reasons) if number != at] == [None] * (SIZE - 1)
        if length == 0.5:
            assert four[at].url in urls, reasons
        if length is None:
            assert four[at].url not in urls and reasons[at]
            return
        wait_for(lambda: bool(four[at].seen()))
        current = source(7.0)
        assert four[at].url in publisher.publish("run-2").instances, pool.members[at].reason
        sums = [float(tensor.double().sum()) for _, tensor in stream(7.0)]
        assert all(instance.sums() == sums for instance in four)
    finally:
        publishing.close()


@pytest.mark.parametrize(
    ("at", "place", "length"),
    [
        case if case in BY_DAY else at_night(*case)
        for case in ((at, place, length) for at in range(SIZE) for place in PLACES for length in LENGTHS)
        if case[1:] != ("busy", None)
    ],
)
def test_of_a_chain_only_the_one_that_stood_still_may_be_left_out(
    four: list[Any], loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch, at: int, place: str, length: float | None
) -> None:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.05)
    require_only(four, loop, at, place, length, "broadcast")
