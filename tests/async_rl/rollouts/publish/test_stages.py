"""Publishes whose stream several stages send at once: equal weights, faults of either end, and who may enter."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from async_rl.config.pool_section import PublishSection
from async_rl.errors import PublishError
from async_rl.rollouts.publish import broadcast
from async_rl.shared.weights.fingerprint import Fingerprint, TensorSpec
from async_rl.shared.weights.rendezvous import Rendezvous
from async_rl.shared.weights.sender import WeightSource
from async_rl.shared.weights.stages import StageSource, by_turns, fingerprint_of_stages
from async_rl.shared.weights.store import join_rendezvous
from tests.support.fresh_seed import fresh_seed
from tests.support.publishing import SPECS, Publishing, publish, stream, sums
from tests.support.stage_senders import StageSenders

pytestmark = pytest.mark.distributed

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


def test_the_parts_come_in_proportion_to_their_bytes_and_each_in_its_order() -> None:
    rng = random.Random(fresh_seed())
    sizes = [[rng.randint(0, 100) for _ in range(rng.choice((0, 1, 30)))] for _ in range(rng.randint(1, 5))]
    parts = [[TensorSpec(f"{at}.{n}", "uint8", (size,)) for n, size in enumerate(of)] for at, of in enumerate(sizes)]
    tensors = [iter([None, *((spec, torch.empty(spec.shape)) for spec in part)]) for part in parts]
    come = [0] * len(parts)
    order = []
    for spec, _ in by_turns(parts, tensors):
        at = int(spec.name.partition(".")[0])
        order.append(spec)
        come[at] += spec.num_bytes
        shares = [done / sum(of) for done, of in zip(come, sizes, strict=True) if sum(of)]
        assert not shares or max(shares) - min(shares) <= max(100 / sum(of) for of in sizes if sum(of)), (
            "each is behind another by a tensor at most"
        )
    assert [[spec for spec in order if spec in part] for part in parts] == parts


def test_a_large_tensor_is_on_its_way_while_the_other_parts_come_as_far() -> None:
    sizes = [[50, 25, 25], [2, 2, 2, 2, 2]]
    parts = [[TensorSpec(f"{at}.{n}", "uint8", (size,)) for n, size in enumerate(of)] for at, of in enumerate(sizes)]
    tensors = [iter([None, *((spec, torch.empty(spec.shape)) for spec in part)]) for part in parts]
    in_order = [spec.name for spec, _ in by_turns(parts, tensors)]
    assert in_order == ["1.0", "1.1", "0.0", "1.2", "0.1", "1.3", "0.2", "1.4"]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_instances_hold_what_all_stages_sent_and_what_is_left_serves_when_one_is_lost(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing, num_stages: int
) -> None:
    one, other = start_receivers_once({}, {})
    publisher, _ = publishing.make(one, other, num_stages=num_stages)
    published = publisher.publish("run-0", lambda: stream(2.0))
    assert set(published.instances) == {one.url, other.url} and one.sums() == other.sums() == sums(2.0)
    parts = [Fingerprint() for _ in range(num_stages)]
    for number, (spec, tensor) in enumerate(stream(2.0)):
        parts[number % num_stages].add(spec, tensor.contiguous().view(-1).view(torch.uint8))
    assert published.fingerprint == fingerprint_of_stages([part.hexdigest() for part in parts])
    assert published.num_bytes == sum(spec.num_bytes for spec in SPECS)
    assert len(publish(publisher, "run-1", 3.0)) == 2 and other.sums() == sums(3.0)
    one.rescript(die="receive")
    assert publish(publisher, "run-2", 4.0) == (other.url,) and other.sums() == sums(4.0)


def test_a_stage_that_stands_still_amid_the_stream_costs_no_instance(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing
) -> None:
    instances = start_receivers_once({}, {})
    timeout_s = 3.0
    publisher, pool = publishing.make(*instances, num_stages=2, timeout_s=timeout_s)

    def late() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        time.sleep(1.5 * timeout_s)
        yield from stream(5.0)

    assert len(publisher.publish("run-0").instances) == 2
    # The second stage asks first.
    calls = iter([late])
    publication = publisher.publish("run-1", lambda: next(calls, lambda: stream(5.0))())
    assert len(publication.instances) == 2 and all(each.sums() == sums(5.0) for each in instances)
    assert [member.reason for member in pool.members] == [None, None]


def test_a_stage_that_does_not_come_is_named_and_no_instance_is_blamed(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing
) -> None:
    instances = start_receivers_once({}, {})
    stages = StageSenders(SPECS, stream, 2)
    nobody = StageSource(stages.source.stages, stages.source.hosts, lambda invitations: None, stages.source.send)
    source = WeightSource(SPECS, stream, by_stage=nobody)
    publisher, pool = publishing.make(*instances, source=source, timeout_s=3.0, wait_s=60.0)
    named = r"broke twice because the trainer did nothing.* stage 1 was not formed .* did not come to it at 127"
    with pytest.raises(PublishError, match=named):
        publish(publisher, "run-0")
    assert {member.reason for member in pool.members} == {"it has not received any weights of this run yet"}


def test_one_that_waits_for_each_stage_in_turn_has_a_timeout_for_each(
    start_receivers_once: Callable[..., list[Any]], publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "ANSWER_MARGIN_S", 0.5)
    timeout_s = 8.0
    instances = start_receivers_once({}, {})
    stages = StageSenders(SPECS, stream, 2)

    def invite(invitations: Any) -> None:
        # After the other instance.
        threading.Timer(1.3 * timeout_s, stages.source.invite, [invitations]).start()

    late = StageSource(stages.source.stages, stages.source.hosts, invite, stages.source.send)
    publisher, pool = publishing.make(
        *instances, source=WeightSource(SPECS, stream, by_stage=late), timeout_s=timeout_s, probes=False
    )
    instances[1].rescript(stall=["come", 0.6 * timeout_s])
    assert len(publish(publisher, "run-0")) == 2, [member.reason for member in pool.members]
    stages.close()


def test_only_its_sender_enters_a_further_stage_as_rank_0_or_says_that_its_group_is_formed() -> None:
    meeting = Rendezvous([1, 1], HOST, PublishSection(timeout_s=TIMEOUT_S), "sockets", num_stages=3)
    (first, _), further = meeting.invitations(), meeting.stage_invitations()
    assert [each.port for each in further] == first.stage_ports and len(set(first.stage_ports)) == 2
    assert len({first.secret, *(each.secret for each in further)}) == 3
    member = join_rendezvous(HOST, first.stage_ports[0], first.secret, TIMEOUT_S)
    for key in ("present/0", "formed", "update/1/word/0", "chain/0"):
        with pytest.raises(PublishError, match="may not write"):
            member.set(key, "")
    with pytest.raises(PublishError, match="cannot be the one of"):
        member.enter_as(0)
    for port, secret in ((further[1].port, further[0].secret), (first.master_port, further[0].secret)):
        with pytest.raises(PublishError, match="secret is of another meeting"):
            join_rendezvous(HOST, port, secret, TIMEOUT_S)
    sender = join_rendezvous(HOST, further[0].port, further[0].secret, TIMEOUT_S)
    sender.enter_as(0)
    sender.set("update/1/word/0", "go")
    with pytest.raises(PublishError, match="cannot be the one of"):
        join_rendezvous(HOST, further[0].port, further[0].secret, TIMEOUT_S).enter_as(0)
    assert meeting.call_off([1, 2])
