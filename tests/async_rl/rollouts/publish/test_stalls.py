"""Four instances, of which one stands still in a publish: whoever is left out, it is that one.

A member of a chain waits for its neighbour, who may wait for another one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from async_rl.shared.weights.fingerprint import TensorSpec
from tests.support.publishing import Publishing
from tests.support.tiers import at_night
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

TIMEOUT_S = 2.0
SIZE = 4
SPECS = [TensorSpec(f"layers.{number}.weight", "float32", (2, 1024, 1024)) for number in range(12)]
"""More than all sockets and messages in flight hold, so that whoever stands still amid the stream holds up the rest."""

PLACES = ("come", "meet", "update", "first", "amid", "busy", "answer", "finish")
LENGTHS = (0.5, 1.0, 1.2, 2.0, None)
"""In timeouts, or for good."""

NUM_STAGES = (1, 2)
"""Further ones are in this process."""

CASES = [
    (at, place, length, stages)
    for at in range(SIZE)
    for place in PLACES
    for length in LENGTHS
    for stages in NUM_STAGES
    if (place, length) != ("busy", None)
]
BY_DAY = [(1, "amid", 1.2, 1), (2, "meet", 1.2, 2), (3, "come", 1.0, 1), (0, "amid", 1.2, 2)]


def stream(scale: float) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for number, spec in enumerate(SPECS):
        yield spec, torch.full(spec.shape, scale + number)


@pytest.fixture
def four(start_receivers_once: Callable[..., list[Any]]) -> list[Any]:
    return start_receivers_once(*[{}] * SIZE)


@pytest.mark.parametrize(
    ("at", "place", "length", "num_stages"), [case if case in BY_DAY else at_night(*case) for case in CASES]
)
def test_of_a_chain_only_the_one_that_stood_still_may_be_left_out(
    four: list[Any], publishing: Publishing, at: int, place: str, length: float | None, num_stages: int
) -> None:
    options = {"timeout_s": TIMEOUT_S, "num_stages": num_stages}
    publisher, pool = publishing.make(*four, specs=SPECS, probes=False, **options)
    if place not in ("come", "meet"):
        assert len(publisher.publish("run-0", lambda: stream(0.0)).instances) == SIZE
    four[at].rescript(stall=[place, None if length is None else length * TIMEOUT_S])
    urls = publisher.publish("run-1", lambda: stream(5.0)).instances
    reasons = [member.reason for member in pool.members]
    assert all((each.url in urls and why is None) or each is four[at] for each, why in zip(four, reasons, strict=True))
    if length == 0.5:
        assert len(urls) == SIZE, reasons
    if length is None:
        assert len(urls) == SIZE - 1 and reasons[at]
        return
    wait_for(lambda: bool(four[at].seen()))
    assert len(publisher.publish("run-2", lambda: stream(7.0)).instances) == SIZE
    sums = [float(tensor.double().sum()) for _, tensor in stream(7.0)]
    assert all(instance.sums() == sums for instance in four)
