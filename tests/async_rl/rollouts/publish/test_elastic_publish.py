"""Publishing to a pool whose instances come, stop, are started anew, or compute with something else than they got."""

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.errors import LeaderFailed, PublishError, RunStopped
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.publish import publisher as publisher_module
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.weights.fingerprint import TensorSpec
from async_rl.shared.weights.sender import WeightSource
from tests.support.publishing import PROMPT, SPECS, Publishing, StreamPublisher, publish, stream, sums
from tests.support.scripted_instance import sample
from tests.support.waiting import wait_for

pytestmark = pytest.mark.distributed

DEADLINE_S = 60.0
MakePublisher = Callable[..., tuple[StreamPublisher, InferencePool]]
WELL = {"refuse": None, "hang": None, "fingerprint": None, "version": "default", "owner": "async-rl", "shift": 0.0}


@pytest.fixture(scope="module")
def pair(start_receivers: Callable[..., list[Any]]) -> list[Any]:
    return start_receivers({}, {})


@pytest.fixture
def well(pair: list[Any]) -> list[Any]:
    """Two instances that take weights, without faults; tests that end or stop one start their own."""
    for instance in pair:
        instance.rescript(**WELL)
    return pair


@pytest.fixture
def make_publisher(loop: EventLoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePublisher]:
    """Its publishers look again soon after they found nobody."""
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.05)
    publishing = Publishing(loop)
    yield publishing.make
    publishing.close()


class Scorer:
    """The trainer's log-probs: those of the scripted instances, whose weights are the published ones."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
        assert list(prompt) == PROMPT
        self.asked += map(tuple, responses)
        known = {tuple(tokens): logprobs for tokens, logprobs in (sample(s, len(prompt), 4) for s in range(16))}
        return [known[tuple(response)] for response in responses]


def register(loop: EventLoopThread, pool: InferencePool, instance: Any, name: str = "late", boot_id: str = "1") -> Any:
    async def call() -> Any:
        return pool.register(instance.url, name, boot_id)

    return loop.run(call())


def test_instances_read_a_snapshot_without_any_weight_group(
    well: list[Any], make_publisher: MakePublisher, tmp_path: Path
) -> None:
    publisher, pool = make_publisher(*well, transport="snapshot", snapshot_dir=tmp_path)
    by_broadcast, _ = make_publisher(*well)
    expected = by_broadcast.publish("other-0", stream)
    before = len(well[0].seen()["calls"])
    publication = publisher.publish("run-0", stream)
    assert publication.instances == tuple(instance.url for instance in well)
    assert (publication.fingerprint, publication.num_bytes) == (expected.fingerprint, expected.num_bytes)
    assert [instance.sums() for instance in well] == [sums()] * 2
    assert "/init_weight_transfer_engine" not in well[0].seen()["calls"][before:]
    assert all(member.serves("run-0") for member in pool.members)


def test_a_snapshot_that_one_instance_cannot_read_leaves_the_others_in_service(
    well: list[Any], make_publisher: MakePublisher, tmp_path: Path
) -> None:
    publisher, pool = make_publisher(*well, transport="snapshot", snapshot_dir=tmp_path)
    well[0].rescript(refuse="update")
    assert publish(publisher, "run-0", 2.0) == (well[1].url,)
    assert "update is refused" in (pool.members[0].reason or "")
    well[0].rescript(refuse=None)
    assert publish(publisher, "run-1", 3.0) == tuple(instance.url for instance in well)
    assert [instance.sums() for instance in well] == [sums(3.0)] * 2


def test_a_broadcast_leaves_the_same_weights_in_a_snapshot(
    well: list[Any], make_publisher: MakePublisher, tmp_path: Path
) -> None:
    publisher, _ = make_publisher(*well, snapshot_dir=tmp_path)
    for number in range(3):
        publish(publisher, f"run-{number}", 1.0 + number)
    assert sorted(path.name for path in tmp_path.glob("run.*")) == ["run.run-1.safetensors", "run.run-2.safetensors"]
    reader, _ = make_publisher(well[1], transport="snapshot", snapshot_dir=tmp_path / "other")
    publish(reader, "other-0", 3.0)
    (copy,) = (tmp_path / "other").glob("run.*")
    assert copy.read_bytes() == (tmp_path / "run.run-2.safetensors").read_bytes()


@pytest.mark.parametrize("transport", ["broadcast", "snapshot", "ipc"])
def test_a_ready_instance_that_has_stopped_costs_seconds_and_returns_when_it_goes_on(
    start_receivers_once: Callable[..., list[Any]],
    well: list[Any],
    make_publisher: MakePublisher,
    tmp_path: Path,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (stopping,) = start_receivers_once({})
    publisher, pool = make_publisher(well[0], stopping, timeout_s=120.0, transport=transport, snapshot_dir=tmp_path)
    both = (well[0].url, stopping.url)
    assert publish(publisher, "run-0") == both
    stopping.process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    assert publish(publisher, "run-1", 2.0) == (well[0].url,)
    assert time.monotonic() - begun < 60.0, "nobody waits for the timeout"
    assert pool.members[1].state == "dead"
    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, "HEALTH_TIMEOUT_S", 120.0)
        begun = time.monotonic()
        assert publish(publisher, "run-2", 3.0) == (well[0].url,)
        assert time.monotonic() - begun < 60.0, "one that counts as dead is not waited for"
    stopping.process.send_signal(signal.SIGCONT)
    assert publish(publisher, "run-3", 4.0) == both
    assert stopping.sums() == sums(4.0)


def test_a_publish_waits_for_an_instance_that_registers_later(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, pool = make_publisher(wait_s=DEADLINE_S)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(publish, publisher, "run-0", 4.0)
        wait_for(lambda: "the publish waits" in caplog.text)
        assert not call.done()
        register(loop, pool, well[0])
        assert call.result(timeout=DEADLINE_S) == (well[0].url,)
    assert well[0].sums() == sums(4.0)


def test_a_run_that_has_to_end_does_not_wait_for_an_instance_first(make_publisher: MakePublisher) -> None:
    """As when its instances get the same SIGTERM, and are gone before."""
    asked: list[int] = []

    def watch() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise RunStopped("training rank 0 was told to end")

    publisher, _ = make_publisher(wait_s=600.0, source=WeightSource(SPECS, stream, watch=watch))
    begun = time.monotonic()
    with pytest.raises(RunStopped, match="rank 0 was told to end"):
        publish(publisher, "run-0")
    assert len(asked) == 2 and time.monotonic() - begun < 300.0


def test_a_publish_that_loses_its_last_instance_waits_for_another(
    start_receivers_once: Callable[..., list[Any]],
    well: list[Any],
    make_publisher: MakePublisher,
    loop: EventLoopThread,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (dying,) = start_receivers_once({})
    publisher, pool = make_publisher(dying, wait_s=DEADLINE_S, snapshot_dir=tmp_path)

    def die_amid() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for item in stream(5.0):
            dying.process.kill()
            yield item

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(publisher.publish, "run-0", die_amid)
        wait_for(lambda: "lost every instance" in caplog.text)
        register(loop, pool, well[0])
        assert call.result(timeout=DEADLINE_S).instances == (well[0].url,)
    assert well[0].sums() == sums(5.0)
    assert publish(publisher, "run-1", 6.0) == (well[0].url,)
    assert sorted(path.name for path in tmp_path.glob("run.*")) == ["run.run-0.safetensors", "run.run-1.safetensors"]


@pytest.mark.parametrize("leaves", ["remove", "drain"])
def test_instances_that_leave_amid_a_publish_are_waited_for_like_lost_ones(
    well: list[Any],
    make_publisher: MakePublisher,
    loop: EventLoopThread,
    caplog: pytest.LogCaptureFixture,
    leaves: str,
) -> None:
    publisher, pool = make_publisher(well[0], wait_s=DEADLINE_S)

    def leave_amid() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        for number, item in enumerate(stream(5.0)):
            if number == 1 and pool.members[0].url == well[0].url:
                loop.run(call_on_loop(lambda: getattr(pool, leaves)(pool.members[0].name)))
            yield item

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(publisher.publish, "run-0", leave_amid)
        wait_for(lambda: "lost every instance" in caplog.text)
        assert not call.done()
        register(loop, pool, well[1])
        assert call.result(timeout=DEADLINE_S).instances == (well[1].url,)
    assert well[1].sums() == sums(5.0)
    assert [member.state for member in pool.members if member.url == well[1].url] == ["ready"]


def test_a_bad_first_instance_does_not_end_the_wait_for_a_good_one(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, pool = make_publisher(well[0], wait_s=DEADLINE_S)
    well[0].rescript(refuse="update")
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(publish, publisher, "run-0", 3.0)
        wait_for(lambda: "the publish waits" in caplog.text)
        assert not call.done()
        register(loop, pool, well[1])
        assert call.result(timeout=DEADLINE_S) == (well[1].url,)
    assert well[1].sums() == sums(3.0)
    assert pool.members[0].entry.failed_publishes == 1


def test_whatever_comes_and_goes_amid_publishes_they_end_with_an_instance_in_service_or_in_time(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread
) -> None:
    """Random orders to the fleet before, during and after the stream; one instance is added again at last."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(12):
        publisher, pool = make_publisher(*rng.sample(well, rng.randint(1, 2)), wait_s=DEADLINE_S)

        def disturb(pool: InferencePool = pool) -> None:
            order = rng.choice(["remove", "drain", "add", "none", "none"])
            here = [member.url for member in pool.members]
            if order == "add":
                for instance in well:
                    if instance.url not in here:
                        pool.add(instance.url)
            elif pool.members and order != "none":
                getattr(pool, order)(rng.choice(pool.members).name)

        def disturbed(number: int = number, disturb: Callable[[], None] = disturb) -> Iterator[Any]:
            for item in stream(1.0 + number):
                loop.run(call_on_loop(disturb))
                yield item

        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(publisher.publish, f"run-{number}", disturbed)
            while not call.done():
                time.sleep(0.2)
                loop.run(call_on_loop(lambda pool=pool: add_again(pool, well[0].url)))
            urls = call.result().instances
        assert urls and set(urls) == {member.url for member in pool.members if member.state == "ready"}
        for instance in well:
            assert instance.url not in urls or instance.sums() == sums(1.0 + number)


def add_again(pool: InferencePool, url: str) -> None:
    """In place of one that drains, if it does."""
    for member in pool.members:
        if member.url == url and member.state == "draining":
            pool.remove(member.name)
    if url not in [member.url for member in pool.members]:
        pool.add(url)


async def call_on_loop(change: Callable[[], object]) -> None:
    change()


def test_a_pool_in_which_nobody_answers_in_time_is_an_error(make_publisher: MakePublisher, well: list[Any]) -> None:
    publisher, pool = make_publisher(well[0])
    well[0].rescript(health=500)
    with pytest.raises(PublishError, match=rf"'run-0' reached no instance:\n  {well[0].url}: .*refused GET /health"):
        publish(publisher, "run-0")
    well[0].rescript(health=200)
    assert publish(publisher, "run-1") == (well[0].url,)
    assert pool.members[0].entry.failed_publishes == 0


def test_an_instance_given_up_has_another_chance_when_it_is_started_anew(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread
) -> None:
    publisher, pool = make_publisher(well[0])
    register(loop, pool, well[1], boot_id="1")
    well[1].rescript(refuse="update")
    for number in range(4):
        assert publish(publisher, f"run-{number}") == (well[0].url,)
    well[1].rescript(refuse=None)
    register(loop, pool, well[1], boot_id="1")
    assert publish(publisher, "run-4") == (well[0].url,)
    register(loop, pool, well[1], boot_id="2")
    assert set(publish(publisher, "run-5")) == {well[0].url, well[1].url}


def test_a_draining_instance_gets_no_weights(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread
) -> None:
    publisher, pool = make_publisher(*well)
    publish(publisher, "run-0", 5.0)

    async def drain() -> None:
        pool.drain(well[1].url)

    loop.run(drain())
    assert publish(publisher, "run-1", 6.0) == (well[0].url,)
    assert well[1].sums() == sums(5.0)


def test_a_late_joiner_loads_the_snapshot_and_serves_in_the_middle_of_a_period(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = make_publisher(well[0], snapshot_dir=tmp_path)
    loop.run(pool.wait_until_ready())
    publish(publisher, "run-0", 7.0)
    late = register(loop, pool, well[1])
    wait_for(lambda: late.serves("run-0"))
    assert well[1].sums() == sums(7.0)
    assert set(publish(publisher, "run-1", 8.0)) == {well[0].url, well[1].url}
    assert [instance.sums() for instance in well] == [sums(8.0)] * 2


def test_a_late_joiner_that_fails_stays_out_until_the_next_publish(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = make_publisher(well[0], snapshot_dir=tmp_path, timeout_s=1.0)
    loop.run(pool.wait_until_ready())
    publish(publisher, "run-0")
    well[1].rescript(hang="update")
    late = register(loop, pool, well[1])
    wait_for(lambda: "within 1 s" in (late.reason or ""))
    well[1].rescript(hang=None)
    assert set(publish(publisher, "run-1", 2.0)) == {well[0].url, well[1].url}
    assert well[1].sums() == sums(2.0)


def test_a_late_joiner_that_must_be_compared_waits_for_the_next_publish(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, tmp_path: Path
) -> None:
    publisher, pool = make_publisher(well[0], snapshot_dir=tmp_path)
    loop.run(pool.wait_until_ready())
    publish(publisher, "run-0")
    well[1].rescript(owner="vllm")
    late = register(loop, pool, well[1])
    wait_for(lambda: "compared with the trainer" in (late.reason or ""))
    assert "/pause" not in well[1].seen()["calls"][-5:]
    assert set(publish(publisher, "run-1", score=Scorer())) == {well[0].url, well[1].url}


def test_the_probe_asks_only_engines_that_may_hold_something_else_than_they_received(
    well: list[Any], make_publisher: MakePublisher
) -> None:
    publisher, _ = make_publisher(*well)
    well[0].rescript(owner="vllm")
    before = [len(instance.seen()["requests"]) for instance in well]
    score = Scorer()
    assert publish(publisher, "run-0", score=score) == tuple(instance.url for instance in well)
    assert score.asked == [tuple(sample(number, len(PROMPT), 4)[0]) for number in range(16)]
    asked = [instance.seen()["requests"][start:] for instance, start in zip(well, before, strict=True)]
    assert [len(requests) for requests in asked] == [1, 0]
    sampling = asked[0][0]["sampling_params"]
    assert (sampling["temperature"], sampling.get("seed"), sampling["max_tokens"]) == (1.0, None, 4)


@pytest.mark.parametrize("shift", [-0.6, math.nan])
def test_an_instance_whose_log_probs_are_not_the_trainers_leaves_service_until_the_next_publish(
    well: list[Any], make_publisher: MakePublisher, loop: EventLoopThread, shift: float
) -> None:
    publisher, pool = make_publisher(*well)
    loop.run(pool.wait_until_ready())
    for instance in well:
        instance.rescript(owner="vllm")
    well[1].rescript(shift=shift)
    assert publish(publisher, "run-0", score=Scorer()) == (well[0].url,)
    reason = pool.members[1].reason or ""
    all_logprobs = [logprob for number in range(16) for logprob in sample(number, len(PROMPT), 4)[1]]
    num = len(all_logprobs)
    both = [f"{logprob + shift:.4f} for {logprob:.4f}" for logprob in all_logprobs]
    if math.isnan(shift):
        assert "log-probs that no token has" in reason
    else:
        assert any(words in reason for words in both) and f"gives {num} of {num} tokens of the probe" in reason
    # It says that it holds the version, and must not come back for that.
    seen_s = pool.members[1].last_seen_s
    wait_for(lambda: pool.members[1].last_seen_s > seen_s + 2.5)
    assert pool.members[1].state == "stale"
    well[1].rescript(shift=-0.4)
    assert publish(publisher, "run-1", score=Scorer()) == tuple(instance.url for instance in well)


def test_an_instance_that_cannot_answer_the_probe_leaves_service(
    well: list[Any], make_publisher: MakePublisher
) -> None:
    publisher, pool = make_publisher(*well)
    well[0].rescript(owner="vllm", refuse_at=len(well[0].seen()["requests"]))
    assert publish(publisher, "run-0", score=Scorer()) == (well[1].url,)
    assert "refused POST /inference/v1/generate with 500" in (pool.members[0].reason or "")


def test_a_stream_that_breaks_leaves_no_file_and_the_next_publish_works(
    well: list[Any], make_publisher: MakePublisher, tmp_path: Path
) -> None:
    publisher, _ = make_publisher(*well, snapshot_dir=tmp_path)

    def broken() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        yield from list(stream())[:2]
        raise ValueError("cannot export head.weight")

    with pytest.raises(LeaderFailed, match=r"ValueError: cannot export head\.weight"):
        publisher.publish("run-0", broken)
    assert not list(tmp_path.glob("run.*"))
    assert publish(publisher, "run-1", 10.0) == tuple(instance.url for instance in well)
    assert [path.name for path in tmp_path.glob("run.*")] == ["run.run-1.safetensors"]
