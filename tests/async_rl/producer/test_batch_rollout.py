import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from async_rl.config.pool_section import PoolSection
from async_rl.config.reward_section import RewardSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import (
    ConfigError,
    InstanceRefused,
    NoInstanceLeft,
    ProducerFailed,
    RewardError,
    RolloutLost,
    RunStopped,
)
from async_rl.method.types import Batch, Group, Prompt, Response, Scores
from async_rl.producer.batch_rollout import BatchRollout, BatchStarts
from async_rl.producer.client import RemoteRun
from async_rl.producer.dock import Docking
from async_rl.producer.frames import error_as_data, frame
from async_rl.rollouts.groups.group_maker import SingleTurns
from async_rl.rollouts.groups.idle_work import IdleWork
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.rewards import Reward, make_reward
from async_rl.shared.event_loop import EventLoopThread
from benchmarks.common.local_producer import LocalProducer as Producer

pytestmark = pytest.mark.distributed

REWARD = """
import time

def score(prompt, responses, row):
    if row.get("fault") == "raises":
        raise KeyError("broken reward")
    if row.get("fault") == "hangs":
        time.sleep(3600)
    return [float(len(response.text)) for response in responses]
"""


class Lengths:
    """A reward in the producer's own thread: the characters of each response, or whatever `fault` does first."""

    correct_at = None

    def __init__(self, fault: Callable[[], Any] = lambda: None) -> None:
        self.fault = fault

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        await asyncio.sleep(0)
        self.fault()
        return Scores(tuple(float(len(response.text)) for response in responses))

    async def close(self) -> None:
        pass


@pytest.fixture
def make_producer(loop: EventLoopThread, tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[..., Producer]]:
    producers: list[tuple[Producer, InferencePool]] = []

    def make(*instances: Any, reward: Reward | None = None, seed: int = 1, **options: Any) -> Producer:
        urls = tuple(instance.url for instance in instances)
        pool = InferencePool(PoolSection(instances=urls, timeout_s=1.0))
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish("v1", urls))
        rollout = RolloutSection(responses_per_prompt=4, max_response_tokens=8)
        maker = SingleTurns(pool, reward or Lengths(), tokenizer, rollout, seed)
        producer = Producer(maker, loop, **options)
        producers.append((producer, pool))
        return producer

    yield make
    for producer, pool in producers:
        producer.close()
        loop.run(pool.close())


def batch(size: int, *, iteration: int = 0, faults: dict[int, str] | None = None) -> Batch:
    rows = [{"fault": (faults or {}).get(i)} for i in range(size)]
    return Batch(iteration, {i: Prompt(f"row{i}", (3, 4, 5 + i), row) for i, row in enumerate(rows)})


def drain(run: RemoteRun) -> list[Group]:
    """All groups of a batch, as they finish."""
    groups: list[Group] = []
    while ready := run.ready(wait=True):
        groups += ready
    return groups


def test_every_prompt_of_the_batch_becomes_one_scored_group(instances, make_producer, tokenizer) -> None:
    (instance,) = instances({"delay_s": 0.01})
    producer = make_producer(instance)
    begun = time.monotonic()
    with producer.start(batch(6), "v1") as run:
        groups = drain(run)
    assert sorted(group.index for group in groups) == list(range(6))
    for group in groups:
        assert group.prompt.prompt_id == f"row{group.index}" and group.iteration == 0
        assert len(group.responses) == len(group.rewards) == 4
        for response, reward in zip(group.responses, group.rewards, strict=True):
            assert response.text == tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
            assert reward == len(response.text)
        assert begun <= group.started_s < group.finished_s <= time.monotonic()


def test_start_returns_at_once_and_the_batch_is_generated_beside_the_consumer(instances, make_producer) -> None:
    (instance,) = instances({"delay_s": 3.0})
    producer = make_producer(instance)
    with producer.start(batch(4), "v1") as run:
        assert run.ready(wait=False) == [], "it returned before anything was answered"
        groups: list[Group] = []
        while len(groups) < 4:
            groups += run.ready(wait=False)
            time.sleep(0.01)


def test_same_run_seed_draws_the_same_samples_and_each_group_has_its_own(instances, make_producer) -> None:
    (instance,) = instances({})

    def samples(iteration: int, **options: Any) -> list[tuple[int, ...]]:
        with make_producer(instance, **options).start(batch(3, iteration=iteration), "v1") as run:
            groups = sorted(drain(run), key=lambda group: group.index)
        return [response.token_ids for group in groups for response in group.responses]

    assert samples(0) == samples(0)
    assert samples(0) != samples(1)
    assert samples(0) != samples(0, seed=2)
    assert len(set(samples(0))) > 8, "by chance two may be the same short one"


def test_instance_that_dies_amid_the_batch_costs_no_group(instances, make_producer) -> None:
    two = instances({"delay_s": 0.05}, {"delay_s": 0.05, "die_at": 3})
    with make_producer(*two).start(batch(12), "v1") as run:
        groups = drain(run)
    assert sorted(group.index for group in groups) == list(range(12))
    assert sum(group.attempts for group in groups) > 12
    assert {response.instance for group in groups for response in group.responses} <= {i.url for i in two}


def test_all_instances_dead_ends_the_batch_in_a_named_error(instances, make_producer) -> None:
    producer = make_producer(*instances({"die_at": 2}, {"die_at": 2}))
    with pytest.raises(NoInstanceLeft), producer.start(batch(8), "v1") as run:
        drain(run)


def test_stale_instance_alone_ends_the_batch(instances, make_producer) -> None:
    producer = make_producer(*instances({"stale": "v0"}))
    with pytest.raises(NoInstanceLeft, match="sampled from weight version 'v0'"), producer.start(batch(2), "v1") as run:
        drain(run)


@pytest.mark.parametrize(
    ("fault", "message"), [("raises", "(?s)row2 failed.*broken reward"), ("hangs", "row2: no answer")]
)
def test_failing_reward_cancels_the_siblings_and_surfaces_at_once(
    instances, make_producer, tmp_path: Path, fault: str, message: str
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (instance,) = instances({"slow_token": 5})
    reward = make_reward(RewardSection(name=f"python:{tmp_path / 'reward.py'}:score", timeout_s=2.0))
    producer = make_producer(instance, reward=reward)
    with pytest.raises(RewardError, match=message) as caught, producer.start(batch(3, faults={2: fault}), "v1") as run:
        drain(run)
    assert "in group" in caught.value.__notes__[-1], "the producer's traceback"
    instance.rescript(slow_token=None)
    with producer.start(batch(3), "v1") as run:
        assert len(drain(run)) == 3


def test_groups_that_cannot_be_sent_end_the_wait_for_them(
    instances, make_producer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection says signs of life all the time."""

    def broken(message: Any, parts: Any = ()) -> Any:
        if "groups" in message:
            raise UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates not allowed")
        return frame(message, parts)

    monkeypatch.setattr("async_rl.producer.server.frame", broken)
    run = make_producer(*instances({})).start(batch(2), "v1")
    with pytest.raises(ProducerFailed, match="surrogates not allowed"), run:
        drain(run)
    assert "the groups of replica 0 cannot be sent" in caplog.text


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ConfigError("no prompt 'row0'"), ConfigError), (KeyError("no prompt 'row0'"), ProducerFailed)],
)
def test_a_batch_that_cannot_be_begun_is_the_error_that_says_why(
    instances, make_producer, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    async def begin(message: Any) -> BatchRollout:
        raise error

    producer = make_producer(*instances({}))
    monkeypatch.setattr(producer, "_begin", begin)
    with pytest.raises(raised, match="no prompt 'row0'"), producer.start(batch(2), "v1") as run:
        drain(run)


@pytest.mark.parametrize("first", [0, 1])
def test_a_batch_that_cannot_be_begun_is_the_error_of_every_replica_and_the_next_one_may_begin(first: int) -> None:
    async def broken() -> BatchRollout:
        raise ConfigError("no prompt")

    async def check() -> None:
        starts = BatchStarts()
        asked = [asyncio.create_task(starts.of(replica, 7, broken)) for replica in (first, 1 - first)]
        assert [str(e) for e in await asyncio.gather(*asked, return_exceptions=True)] == ["no prompt"] * 2
        again = SimpleNamespace(iteration=7)

        async def sound() -> Any:
            return again

        assert await starts.of(0, 7, sound) is again and await starts.of(1, 7, broken) is again

    asyncio.run(asyncio.wait_for(check(), 10.0))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_leaving_early_closes_the_requests_in_flight(instances, make_producer, error: type[BaseException]) -> None:
    (instance,) = instances({"delay_s": 30})
    producer = make_producer(instance)
    with pytest.raises(error), producer.start(batch(4), "v1"):
        while len(instance.seen()["requests"]) < 4:
            time.sleep(0.01)
        raise error
    while instance.seen()["num_cancelled"] < 4:
        time.sleep(0.01)
    assert all("rollouts" not in thread.name for thread in threading.enumerate())


def test_refusal_of_a_request_names_the_prompt(instances, make_producer) -> None:
    (instance,) = instances({})
    producer = make_producer(instance)
    instance.rescript(max_model_len=10)
    with pytest.raises(InstanceRefused, match="longer than the model") as caught, producer.start(batch(1), "v1") as run:
        drain(run)
    assert caught.value.__notes__[0] == "asked for prompt row0, index 0 of iteration 0"


class Idle:
    """Notes what happens to it; works until it is stopped."""

    def __init__(self, fault: str | None = None) -> None:
        self.events: list[str] = []
        self.fault = fault
        self.lasts_s = 0.5

    async def run(self, iteration: int, version: str) -> None:
        self.events.append(f"run {iteration} {version}")
        if self.fault:
            raise ValueError(self.fault)
        await asyncio.sleep(self.lasts_s)
        self.events.append("finished")

    def note_awaited(self) -> None:
        self.events.append("awaited")

    async def stop(self) -> None:
        self.events.append("stop")


@pytest.mark.parametrize("fault", [None, "no such row"])
def test_the_idle_pool_works_between_the_last_group_and_the_end_of_the_batch(
    instances, make_producer, caplog: pytest.LogCaptureFixture, fault: str | None
) -> None:
    (instance,) = instances({})
    idle = Idle(fault)
    producer = make_producer(instance, idle_work=idle)
    with producer.start(batch(3, iteration=7), "v1") as run:
        assert len(drain(run)) == 3
        while not idle.events:
            time.sleep(0.01)
    assert [event for event in idle.events if event != "finished"] == ["run 7 v1", "awaited", "stop"]
    assert ("the work of the idle pool failed in iteration 7" in caplog.text) == (fault is not None)


def test_a_batch_that_is_left_early_stops_idle_work_that_never_began(instances, make_producer) -> None:
    (instance,) = instances({"delay_s": 30})
    idle = Idle()
    with pytest.raises(ValueError), make_producer(instance, idle_work=idle).start(batch(2), "v1"):
        raise ValueError
    assert idle.events == ["stop"]


def test_rollouts_that_are_not_needed_close_their_requests_and_the_pool_is_idle(instances, make_producer) -> None:
    (instance,) = instances({"delay_s": 30})
    idle = Idle()
    with make_producer(instance, idle_work=idle).start(batch(3), "v1") as run:
        while len(instance.seen()["requests"]) < 3:
            time.sleep(0.01)
        run.cancel({0, 1, 2})
        assert run.ready(wait=True) == []
        while instance.seen()["num_cancelled"] < 3 or not idle.events:
            time.sleep(0.01)
    assert [event for event in idle.events if event != "finished"] == ["run 0 v1", "awaited", "stop"]


def test_a_batch_ends_when_the_work_of_the_idle_pool_has_finished(instances, make_producer) -> None:
    idle = Idle()
    with make_producer(*instances({}), idle_work=idle).start(batch(1), "v1") as run:
        drain(run)
    assert "finished" in idle.events and idle.events[-1] == "stop"


def test_a_run_that_has_to_end_waits_for_no_work_of_the_idle_pool_and_says_so_later(
    instances, make_producer, caplog: pytest.LogCaptureFixture
) -> None:
    def watch() -> None:
        raise RunStopped("training rank 0 was told to end (SIGTERM)")

    idle = Idle()
    idle.lasts_s = 3600.0
    producer = make_producer(*instances({}), idle_work=idle)
    with producer.start(batch(1), "v1") as run:
        drain(run)
        producer.watch = watch
    assert idle.events == ["run 0 v1", "awaited", "stop"]
    assert "the work of the idle pool in iteration 0 ends early: training rank 0 was told to end" in caplog.text


def cancelled_from_beside() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("fault", [cancelled_from_beside, sys.exit], ids=["cancelled", "exits"])
def test_a_rollout_that_is_ended_from_beside_is_an_error_and_never_a_success(
    instances, make_producer, fault: Callable[[], Any]
) -> None:
    producer = make_producer(*instances({}))
    real, producer.maker._reward = producer.maker._reward, Lengths(fault)
    with pytest.raises(RolloutLost, match="row0, index 0 of iteration 0"), producer.start(batch(1), "v1") as run:
        drain(run)
    producer.maker._reward = real
    with producer.start(batch(3), "v1") as run:
        assert len(drain(run)) == 3


def test_what_goes_wrong_with_a_rollout_that_is_not_needed_any_more_ends_nothing(instances, make_producer) -> None:
    idle = Idle()
    producer = make_producer(*instances({}), idle_work=idle)
    scoring, failed = threading.Event(), threading.Event()

    class Ungrateful(Lengths):
        async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
            scoring.set()
            try:
                await asyncio.sleep(30)
            finally:
                failed.set()
                raise KeyError("broken reward")

    real, producer.maker._reward = producer.maker._reward, Ungrateful()
    with producer.start(batch(1), "v1") as run:
        assert scoring.wait(60)
        run.cancel({0})
        assert run.ready(wait=True) == [] and failed.wait(60)
        while not idle.events:
            time.sleep(0.01)
        assert run.ready(wait=True) == []
    producer.maker._reward = real


def test_a_failure_that_crosses_the_word_that_it_is_not_needed_ends_nothing(instances, make_producer) -> None:
    producer = make_producer(*instances({}))
    with producer.start(batch(2, faults={}), "v1") as run:
        while not (groups := run.ready(wait=False)):
            time.sleep(0.01)
        (left,) = {0, 1} - {group.index for group in groups} or (None,)
        if left is not None:
            run.cancel({left})
            run._note({"failed": error_as_data(RewardError("too late")), "index": left}, b"")
            assert run.ready(wait=True) == []
        with pytest.raises(RewardError, match="of another"):
            run._note({"failed": error_as_data(RewardError("of another")), "index": groups[0].index}, b"")


def test_whoever_waits_for_a_group_can_be_called_away(instances, make_producer) -> None:
    producer = make_producer(*instances({"delay_s": 30}))

    def stop() -> None:
        raise RunStopped("SIGTERM")

    producer.watch = stop
    with pytest.raises(RunStopped), producer.start(batch(1), "v1") as run:
        drain(run)


@pytest.fixture
def batch_of(instances, make_producer, loop: EventLoopThread) -> Callable[..., BatchRollout]:
    """Begins a batch of some mini-batches on the loop, for replicas that a test plays."""
    running: list[BatchRollout] = []

    def begin(
        docking: Docking,
        *sizes: int,
        reward: Reward | None = None,
        idle_work: IdleWork | None = None,
        rest: Callable[[], Awaitable[None]] | None = None,
        **script: Any,
    ) -> BatchRollout:
        producer = make_producer(*instances({"delay_s": 0.01, **script}), reward=reward)

        async def start() -> BatchRollout:
            parts = batch(sum(sizes)).split(len(sizes))
            return BatchRollout(producer.maker, parts, "v1", docking, idle_work, rest=rest)

        running.append(loop.run(start()))
        return running[-1]

    yield begin
    for each in running:
        loop.run(each.leave(waits=False))


async def next_message(messages: AsyncIterator[Any]) -> dict[str, Any]:
    message, _ = await asyncio.wait_for(anext(messages), 60)
    return message


async def drained(running: BatchRollout, replica: int, ends: int) -> list[list[int]]:
    """What a replica got of each mini-batch; it trains each group at once."""
    found: list[list[int]] = [[]]
    messages = running.messages(replica)
    while len(found) <= ends:
        match await next_message(messages):
            case {"groups": headers}:
                indices = [header["index"] for header in headers]
                found[-1] += indices
                running.begin(replica, [(index, 0) for index in indices])
                running.begin(replica, [])
            case {"complete": number}:
                assert number == len(found) - 1
                found.append([])
    return found[:ends]


def test_replicas_share_each_mini_batch_and_learn_of_its_end(batch_of, loop: EventLoopThread) -> None:
    running = batch_of(Docking(3), 7, 6)

    async def all_of_them() -> list[list[list[int]]]:
        return await asyncio.gather(*(drained(running, replica, 2) for replica in range(3)))

    parts = loop.run(all_of_them())
    assert sorted(i for part in parts for i in part[0]) == list(range(6)), "13 prompts in two mini-batches"
    assert sorted(i for part in parts for i in part[1]) == list(range(6, 13))


def test_what_waits_in_the_dock_stays_there_when_all_rollouts_have_ended(batch_of, loop: EventLoopThread) -> None:
    running = batch_of(Docking(2, max_ahead=1), 8)

    async def slowly() -> list[list[list[int]]]:
        while not running._task.done():
            await asyncio.sleep(0.01)
        return await asyncio.gather(*(drained(running, replica, 1) for replica in range(2)))

    parts = loop.run(slowly())
    assert sorted(i for part in parts for i in part[0]) == list(range(8))


def test_rollouts_that_are_ended_from_beside_are_a_failure(batch_of, loop: EventLoopThread) -> None:
    running = batch_of(Docking(2), 4, delay_s=30)

    async def ended() -> list[dict[str, Any]]:
        running._task.cancel()
        return [await next_message(running.messages(replica)) for replica in range(2)]

    assert all("something beside them cancelled them" in message["failed"][1] for message in loop.run(ended()))


def test_where_training_waits_for_the_batch_no_group_leaves_before_all_have_finished(
    batch_of, loop: EventLoopThread
) -> None:
    seen: list[int] = []

    class Counting(Lengths):
        async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
            seen.append(0)
            return await super().score(prompt, responses)

    running = batch_of(Docking(2, holds=True), 5, reward=Counting())

    async def first() -> dict[str, Any]:
        return await next_message(running.messages(0))

    assert loop.run(first())["groups"] and len(seen) == 5


class Evaluation:
    """Work of the idle pool that says when it is at work."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    async def run(self, iteration: int, version: str) -> None:
        self.said.append("evaluation begins")
        await asyncio.sleep(0.05)
        self.said.append("evaluation ends")

    def note_awaited(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def test_where_pools_take_turns_the_instances_rest_after_the_evaluation_and_before_the_first_group(
    batch_of, loop: EventLoopThread
) -> None:
    said: list[str] = []

    async def rest() -> None:
        said.append("rest")

    running = batch_of(Docking(holds=True), 5, idle_work=Evaluation(said), rest=rest)

    async def first() -> dict[str, Any]:
        message = await next_message(running.messages(0))
        said.append("groups")
        return message

    assert len(loop.run(first())["groups"]) == 5
    assert said == ["evaluation begins", "evaluation ends", "rest", "groups"]


def test_a_rest_that_fails_ends_the_batch_for_every_replica(batch_of, loop: EventLoopThread) -> None:
    async def rest() -> None:
        raise RuntimeError("no rest")

    running = batch_of(Docking(2, holds=True), 4, rest=rest)

    async def failures() -> list[dict[str, Any]]:
        return [await next_message(running.messages(replica)) for replica in range(2)]

    assert all("without all groups" in message["failed"][1] for message in loop.run(failures()))


def test_every_replica_learns_of_a_failure(batch_of, loop: EventLoopThread) -> None:
    def fail() -> None:
        raise KeyError("broken reward")

    running = batch_of(Docking(2), 4, reward=Lengths(fail))

    async def failures() -> list[dict[str, Any]]:
        return [await next_message(running.messages(replica)) for replica in range(2)]

    assert all("broken reward" in message["failed"][1] for message in loop.run(failures()))


def test_groups_that_finish_together_share_a_frame(batch_of, loop: EventLoopThread) -> None:
    running = batch_of(Docking(holds=True), 6)

    async def first_two() -> list[dict[str, Any]]:
        messages = running.messages(0)
        return [await next_message(messages) for _ in range(2)]

    groups, end = loop.run(first_two())
    assert len(groups["groups"]) == 6 and end == {"complete": 0}
