"""Publishing by broadcast to real receiving instances, and to some that fail at every step."""

import logging
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.config.pool_section import PublishSection
from async_rl.errors import LeaderFailed, ProducerLost, PublishError
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.publish.remote_sender import RemoteSender, serve
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSender, WeightSource
from tests.support.publishing import SPECS, Publishing, StreamPublisher, publish, remote, stream, sums
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

WELL = {"refuse": None, "hang": None, "die": None, "fingerprint": None, "version": "default", "broken_groups": 0}
WELL |= {"takes_single_calls_only": False}


@pytest.fixture(scope="module")
def trio(start_receivers: Callable[..., list[Any]]) -> list[Any]:
    return start_receivers({}, {}, {})


@pytest.fixture
def well(trio: list[Any]) -> list[Any]:
    """Three instances that take weights, without faults; tests that end one start their own."""
    for instance in trio:
        instance.rescript(**WELL)
    return trio


@pytest.fixture(params=["broadcast", "ipc"])
def make_publisher(
    loop: EventLoopThread, request: pytest.FixtureRequest
) -> Iterator[Callable[..., tuple[StreamPublisher, InferencePool]]]:
    publishing = Publishing(loop)
    yield lambda *instances, **options: publishing.make(*instances, **({"transport": request.param} | options))
    publishing.close()


def reasons(pool: InferencePool) -> list[str]:
    return [member.reason or "in service" for member in pool.members]


def test_every_instance_receives_the_weights_and_serves_their_version(well, make_publisher) -> None:
    publisher, pool = make_publisher(*well)
    publication = publisher.publish("run-0", stream)
    assert publication.instances == tuple(instance.url for instance in well)
    assert publication.version == "run-0"
    assert publication.num_bytes == 3000 * 4 + 7 * 2 + 64 * 50 * 4
    assert [instance.sums() for instance in well] == [sums()] * 3
    assert all(member.serves("run-0") for member in pool.members)
    assert publish(publisher, "run-1", 2.0) == publication.instances
    assert [instance.sums() for instance in well] == [sums(2.0)] * 3


UPDATE = ["/is_sleeping", "/pause", "/start_weight_update", "/update_weights"]
PROOFS = ["/collective_rpc", "/finish_weight_update", "/collective_rpc", "/resume", "/weight_info"]
SEQUENCE = "/async_rl/sequence"


@pytest.mark.parametrize(
    ("script", "calls"),
    [
        ({}, ["/health", SEQUENCE, *UPDATE, SEQUENCE, *PROOFS]),
        ({"takes_single_calls_only": True}, ["/health", *UPDATE, *PROOFS]),
    ],
    ids=["sequences", "single calls"],
)
def test_a_publish_is_a_health_check_and_two_sequences_with_the_group_of_the_one_before(
    well, make_publisher, script: dict[str, Any], calls: list[str]
) -> None:
    well[0].rescript(**script)
    publisher, _ = make_publisher(*well)
    for number in range(2):
        publish(publisher, f"run-{number}")
    before = len(well[0].seen()["calls"])
    for number in range(2, 5):
        publish(publisher, f"run-{number}")
    seen = well[0].seen()["calls"][before:]
    assert seen == calls * 3


@pytest.mark.parametrize("route", ["init", "pause", "update", "finish"])
def test_instance_that_refuses_a_step_leaves_the_pool_and_returns_when_it_is_well(
    well, make_publisher, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, pool = make_publisher(*well)
    well[1].rescript(refuse=route)
    with caplog.at_level(logging.WARNING):
        assert publish(publisher, "run-0", 3.0) == (well[0].url, well[2].url)
    assert f"{route} is refused" in reasons(pool)[1]
    assert [well[0].sums(), well[2].sums()] == [sums(3.0)] * 2
    well[1].rescript(refuse=None)
    assert publish(publisher, "run-1", 4.0) == tuple(instance.url for instance in well)
    assert [instance.sums() for instance in well] == [sums(4.0)] * 3


def test_instance_with_other_bytes_than_sent_leaves_the_pool(well, make_publisher) -> None:
    publisher, pool = make_publisher(*well)
    well[0].rescript(fingerprint="0123")
    assert publish(publisher, "run-0") == (well[1].url, well[2].url)
    assert "fingerprints ['0123'], sent was" in reasons(pool)[0]


@pytest.mark.parametrize("route", ["init", "update", "receive"])
def test_instance_that_dies_leaves_the_pool_and_the_rest_receive_everything(
    start_receivers_once, well, make_publisher, route: str
) -> None:
    (dying,) = start_receivers_once({"die": route})
    publisher, pool = make_publisher(well[0], dying, well[2], timeout_s=120.0)
    begun = time.monotonic()
    assert publish(publisher, "run-0", 5.0) == (well[0].url, well[2].url)
    assert time.monotonic() - begun < 60.0, "nobody waits for the timeout"
    assert "did not answer" in reasons(pool)[1]
    assert [well[0].sums(), well[2].sums()] == [sums(5.0)] * 2
    assert publish(publisher, "run-1", 6.0) == (well[0].url, well[2].url)


@pytest.mark.parametrize("route", ["init", "update"])
def test_instance_that_hangs_costs_the_timeout_and_leaves_the_pool(well, make_publisher, route: str) -> None:
    publisher, pool = make_publisher(*well, timeout_s=3.0)
    well[2].rescript(hang=route)
    assert publish(publisher, "run-0", 7.0) == (well[0].url, well[1].url)
    assert "did not" in reasons(pool)[2]
    assert [well[0].sums(), well[1].sums()] == [sums(7.0)] * 2


@pytest.mark.parametrize("at", [0, 1, 2])
def test_instance_that_stops_amid_the_stream_costs_the_timeout_and_leaves_the_pool_alone(
    start_receivers_once, well, make_publisher, at: int
) -> None:
    (stopped,) = start_receivers_once({})
    others = [well[0], well[2]]
    publisher, pool = make_publisher(*others[:at], stopped, *others[at:], timeout_s=3.0)
    publish(publisher, "run-0")
    is_stopped = False

    def stop_amid() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        nonlocal is_stopped
        for number, item in enumerate(stream(8.0)):
            if number == 1 and not is_stopped:
                stopped.process.send_signal(signal.SIGSTOP)
                is_stopped = True
            yield item

    begun = time.monotonic()
    assert publisher.publish("run-1", stop_amid).instances == tuple(instance.url for instance in others)
    assert time.monotonic() - begun < 60.0, "it costs one timeout of 3 s, and 5 s for an answer then"
    assert [reason == "in service" for reason in reasons(pool)] == [place != at for place in range(3)]
    assert "did not answer in time" in reasons(pool)[at]
    assert [instance.sums() for instance in others] == [sums(8.0)] * 2


def test_no_instance_left_is_an_error_that_names_each_reason(well, make_publisher) -> None:
    publisher, pool = make_publisher(well[0], well[1])
    well[0].rescript(refuse="update")
    well[1].rescript(refuse="finish")
    with pytest.raises(PublishError) as caught:
        publish(publisher, "run-0")
    assert "weight version 'run-0' reached no instance" in str(caught.value)
    assert f"{well[0].url}: instance" in str(caught.value) and "update is refused" in str(caught.value)
    assert f"{well[1].url}: instance" in str(caught.value) and "finish is refused" in str(caught.value)
    for instance in well:
        instance.rescript(**WELL)
    assert publish(publisher, "run-1", 9.0) == (well[0].url, well[1].url)
    assert all(member.state == "ready" for member in pool.members)


def test_a_publish_whose_groups_break_for_all_goes_on_until_one_holds(well, make_publisher, caplog) -> None:
    publisher, pool = make_publisher(*well, wait_s=240.0, timeout_s=120.0)
    for instance in well:
        instance.rescript(**WELL | {"broken_groups": 3})
    begun = time.monotonic()
    served = publish(publisher, "run-0")
    assert time.monotonic() - begun < 100.0, "a rendezvous that is called off costs no timeout"
    assert "lost every instance on its way, and tries again" in caplog.text
    assert {member.url for member in pool.members if member.serves("run-0")} == set(served) != set()
    for instance in well:
        instance.rescript(**WELL)
    assert publish(publisher, "run-1") == tuple(instance.url for instance in well)


def test_a_group_that_never_holds_ends_the_publish_with_each_reason(well, make_publisher) -> None:
    publisher, _ = make_publisher(*well, wait_s=3.0, timeout_s=1.0)
    for instance in well:
        instance.rescript(**WELL | {"broken_groups": 1000})
    with pytest.raises(PublishError, match=r"reached no instance:(\n  .*(was reset|ended its connection).*){3}"):
        publish(publisher, "run-0")
    for instance in well:
        instance.rescript(**WELL)
    assert len(publish(publisher, "run-1")) == 3


def test_instance_that_never_recovers_is_given_up(well, make_publisher) -> None:
    publisher, pool = make_publisher(well[0], well[1])
    well[1].rescript(refuse="update")
    for number in range(3):
        assert publish(publisher, f"run-{number}") == (well[0].url,)
    before = len(well[1].seen()["calls"])
    assert publish(publisher, "run-3") == (well[0].url,)
    assert len(well[1].seen()["calls"]) == before
    assert pool.members[1].entry.failed_publishes == 3


@pytest.mark.parametrize("last", ["form", "wait_formed", "wait_accepted", "send"])
def test_a_sender_whose_producer_is_lost_amid_a_publish_serves_the_next_one(well, make_publisher, last: str) -> None:
    """With instances that wait for a group, for the rest of a stream, or to have it compared."""
    config = PublishSection(timeout_s=10.0)
    with closing(WeightSender(WeightSource(SPECS, stream), config, "run")) as sender:

        def call(name: str, arguments: list[Any]) -> Any:
            answer = serve(sender, name, arguments)
            if name == last:
                raise ProducerLost("its process has ended")
            return answer

        lost, _ = make_publisher(*well, through=RemoteSender(call), probes=False)
        with pytest.raises(ProducerLost):
            publish(lost, "run-0")
        sender.leave_group()
        begun = time.monotonic()
        other, _ = make_publisher(*well, through=remote(sender), probes=False)
        assert publish(other, "run-1") == tuple(instance.url for instance in well)
        assert time.monotonic() - begun < 5.0, "no instance waits for the lost one until its timeout"
        assert [instance.sums() for instance in well] == [sums()] * 3


def test_error_of_the_stream_itself_is_raised_and_the_next_publish_works(well, make_publisher) -> None:
    publisher, _ = make_publisher(*well)

    def broken() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield from list(stream())[:2]
        raise ValueError("cannot export head.weight")

    with pytest.raises(LeaderFailed, match=r"ValueError: cannot export head\.weight"):
        publisher.publish("run-0", broken)
    assert publish(publisher, "run-1", 10.0) == tuple(instance.url for instance in well)
    assert [instance.sums() for instance in well] == [sums(10.0)] * 3


@pytest.fixture(scope="module")
def sleepers(start_receivers: Callable[..., list[Any]]) -> list[Any]:
    """Of their own: they may sleep in the end."""
    return start_receivers({}, {}, {})


def in_turns(make_publisher: Callable[..., Any], instances: list[Any], folder: Path) -> Any:
    return make_publisher(*instances, takes_turns=True, probes=False, transport="snapshot", snapshot_dir=folder)


def test_instances_that_take_turns_wake_for_weights_first_and_for_keys_and_values_last(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    publish(publisher, "run-0")
    before = len(sleepers[0].seen()["calls"])
    loop.run(pool.sleep(5.0))
    # Nobody joins while the trainer has the devices.
    assert pool.late_joiners.is_closed and not pool.late_joiners.may_admit(pool.members[0])
    publish(publisher, "run-1")
    assert not pool.late_joiners.is_closed
    calls = sleepers[0].seen()["calls"][before:]
    update = ["/start_weight_update", "/update_weights", "/collective_rpc", "/finish_weight_update", "/collective_rpc"]
    publishing = ["/health", "/sleep", "/pause", "/wake_up", *update, "/wake_up", "/resume", "/weight_info"]
    assert [call for call in calls if call != SEQUENCE] == ["/sleep", *publishing]
    assert all(member.serves("run-1") for member in pool.members)


@pytest.mark.parametrize("route", ["sleep", "wake weights", "wake kv_cache"])
def test_one_that_does_not_sleep_or_wake_is_left_out_until_it_does(
    sleepers, make_publisher, tmp_path: Path, route: str
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    sleepers[1].rescript(refuse=route)
    assert publish(publisher, "run-0") == (sleepers[0].url, sleepers[2].url)
    assert f"{route} is refused" in reasons(pool)[1]
    sleepers[1].rescript(refuse=None)
    assert publish(publisher, "run-1") == tuple(instance.url for instance in sleepers)


def test_one_that_does_not_sleep_at_the_end_of_the_rollouts_is_out_of_service(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    publish(publisher, "run-0")
    sleepers[2].rescript(refuse="sleep")
    awake = loop.run(pool.sleep(5.0))
    assert list(awake) == [pool.members[2]] and "sleep is refused" in str(awake[pool.members[2]])
    assert [member.state == "ready" for member in pool.members] == [True, True, False]
    assert "did not go to sleep" in reasons(pool)[2]
    sleepers[2].rescript(refuse=None)


def test_one_that_is_out_of_service_is_put_to_sleep_too(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    publish(publisher, "run-0")

    async def fail() -> None:
        pool.note_failure(pool.members[1], "a request failed")

    loop.run(fail())
    loop.run(pool.sleep(5.0))
    assert [instance.seen()["calls"][-1] for instance in sleepers] == ["/sleep"] * 3
    assert reasons(pool)[1] == "a request failed"


def test_one_that_was_removed_by_hand_is_put_to_sleep_too(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    publish(publisher, "run-0")

    async def remove() -> Member:
        return pool.remove(sleepers[1].url)

    removed = loop.run(remove())
    sleepers[1].rescript(refuse="sleep")
    assert list(loop.run(pool.sleep(5.0))) == [removed], "it keeps memory"
    sleepers[1].rescript(refuse=None)
    assert not loop.run(pool.sleep(5.0)) and removed not in pool.members
    asked = sleepers[1].seen()["calls"]
    assert asked[-1] == "/sleep"
    loop.run(pool.sleep(5.0))
    assert sleepers[1].seen()["calls"] == asked, "it may serve others by now"


@pytest.mark.parametrize("takes_turns", [False, True])
def test_those_that_are_gone_are_forgotten(make_publisher, loop: EventLoopThread, takes_turns: bool) -> None:
    _, pool = make_publisher(Gone(), takes_turns=takes_turns)

    async def join_and_leave(number: int) -> "weakref.ref[Any]":
        member = pool.add(f"http://127.0.0.1:{number}")
        pool.remove(member.name)
        return weakref.ref(member.client)

    # Nobody listens at such ports.
    left = [loop.run(join_and_leave(number)) for number in range(1, 200)]
    assert sum(each() is not None for each in left) == (199 if takes_turns else 0)
    if takes_turns:
        assert not loop.run(pool.sleep(5.0))
        assert sum(each() is not None for each in left) == 0


class Gone:
    url = "http://127.0.0.1:999"


def test_one_that_comes_or_wakes_while_the_trainer_has_the_device_is_put_to_sleep(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    publish(publisher, "run-0")
    loop.run(pool.wait_until_ready())
    loop.run(pool.sleep(5.0))

    async def fail() -> None:
        pool.note_failure(pool.members[1], "it was started anew")

    def num_sleeps() -> list[int]:
        return [instance.seen()["calls"].count("/sleep") for instance in sleepers]

    before = num_sleeps()
    loop.run(fail())
    wait_for(lambda: num_sleeps()[1] > before[1])
    assert num_sleeps()[::2] == before[::2]


def test_one_that_has_served_is_tried_once_more_where_it_refuses_a_step(
    start_receivers_once, make_publisher, tmp_path: Path
) -> None:
    (instance,) = start_receivers_once({})
    publisher, pool = make_publisher(instance, transport="snapshot", snapshot_dir=tmp_path, probes=False, wait_s=60.0)
    publish(publisher, "run-0")
    num_tries = 0

    def mended_at_the_second() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        nonlocal num_tries
        num_tries += 1
        instance.rescript(refuse="update" if num_tries == 1 else None)
        return stream()

    assert publisher.publish("run-1", mended_at_the_second).instances == (instance.url,)
    assert num_tries == 2 and pool.members[0].serves("run-1")


def test_one_that_hangs_before_it_has_served_keeps_memory(
    sleepers, make_publisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = in_turns(make_publisher, sleepers, tmp_path)
    sleepers[1].rescript(refuse="wake kv_cache")
    publish(publisher, "run-0")
    sleepers[1].rescript(refuse=None, hang="sleep")
    assert list(loop.run(pool.sleep(0.5))) == [pool.members[1]] and pool.members[1].version is None
    # As a trainer finds it that is started again.
    _, another = in_turns(make_publisher, sleepers, tmp_path)
    assert list(loop.run(another.sleep(0.5))) == [another.members[1]]
    sleepers[1].rescript(hang=None)
