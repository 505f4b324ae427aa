"""A group's way through a pool whose instances fail in every way: the samples are those of a sound one."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import (
    BrokenAnswer,
    ConnectionLost,
    InstanceError,
    InstanceRefused,
    InstanceStalled,
    InstanceTooSlow,
    NoInstanceLeft,
    PromptFailed,
    RequestInvalid,
    StaleWeights,
)
from async_rl.method.types import Response
from async_rl.rollouts.instance.model_tokens import ModelTokens
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.group_rollout import MAX_FAILURES, GroupRollout
from async_rl.rollouts.pool.health import INTERVAL_WITHOUT_S, HealthWatch
from async_rl.rollouts.pool.late_joiners import LateJoiners
from async_rl.rollouts.pool.member import Member
from async_rl.rollouts.pool.roster import Roster
from async_rl.shared.protocol.inference import SamplingParams
from tests.support import virtual_time
from tests.support.sampling_client import Fault, SamplingClient, faults_of
from tests.support.scripted_instance import sample

PROMPT = (3, 4)
MAX_TOKENS = 24
LONG = next(seed for seed in range(1000) if len(sample(seed, len(PROMPT), MAX_TOKENS)[0]) > MAX_FAILURES + 2)
"""A seed whose response is longer than any patience."""


def run(scenario: Coroutine[Any, Any, None]) -> None:
    virtual_time.run(asyncio.wait_for(scenario, 3600.0))


def failing(make: Callable[[], InstanceError], *, cuts: bool = False) -> Fault:
    def fail(partials: Sequence[PartialRollout]) -> InstanceError:
        for partial in partials if cuts else ():
            partial.cut(0)
        return make()

    return fail


FAULTS = {
    "reset": failing(lambda: ConnectionLost("reset")),
    "500": failing(lambda: InstanceRefused("engine is broken", 500)),
    "429": failing(lambda: InstanceRefused("busy", 429)),
    "stalled": failing(lambda: InstanceStalled("no tokens")),
    "slow": failing(lambda: InstanceTooSlow("slow")),
    "stale": failing(lambda: StaleWeights("v0"), cuts=True),
    "broken": failing(lambda: BrokenAnswer("flood"), cuts=True),
    "unfinished": failing(lambda: InstanceError("the answer ended")),
}


class Stage:
    """A roster of instances that sample in this process, all in service with v1."""

    def __init__(self, *clients: SamplingClient, **settings: Any) -> None:
        self.roster = Roster(PoolSection(instances=tuple(client.url for client in clients), **settings), None)
        for client in clients:
            self.roster.add(client.url).client = client  # type: ignore[assignment]
        holders = {client.url: f"boot of {client.url}" for client in clients}
        self.roster._membership.end_publish("v1", [member.entry for member in self.members], holders)

    @property
    def members(self) -> tuple[Member, ...]:
        return self.roster.members

    def rollout(self, n: int, seed: int = 0) -> GroupRollout:
        sampling = SamplingParams(n=n, max_tokens=MAX_TOKENS, seed=seed, logprobs=0)
        return GroupRollout(self.roster, PROMPT, sampling, f"v1-{seed}", "v1", 10.0)

    def require_idle(self) -> None:
        for member in self.members:
            assert (member.outstanding_tokens, member.num_open, member.requests, member.waiting) == (0, 0, set(), set())
        assert not self.roster.router.is_waited_for and not self.roster.router._promised


def require_samples(responses: Sequence[Response], seed: int) -> None:
    for j, response in enumerate(responses):
        token_ids, logprobs = sample(seed + j, len(PROMPT), MAX_TOKENS)
        assert response.token_ids == tuple(token_ids) and response.logprobs == tuple(logprobs)
        assert response.weight_versions == {"v1"}


@pytest.mark.parametrize("fault", FAULTS)
def test_groups_come_to_their_ends_with_the_samples_of_a_sound_instance(fault: str) -> None:
    async def scenario(rng: Random) -> None:
        # The last two stay sound, so that no fault of the first one can end the run.
        failing = SamplingClient("http://failing:1", faults_of(rng, [FAULTS[fault]], 0.7))
        stage = Stage(failing, *(SamplingClient(f"http://sound-{i}:1") for i in range(2)))
        sizes = [rng.randint(1, 5) for _ in range(6)]
        made = await asyncio.gather(*(stage.rollout(n, 10 * i).run() for i, n in enumerate(sizes)))
        for i, (responses, num_attempts) in enumerate(made):
            assert len(responses) == sizes[i]
            require_samples(responses, 10 * i)
            assert num_attempts >= 1 + max(response.num_continued for response in responses)
            assert all(response.num_resampled == 0 for response in responses) or fault in ("stale", "broken")
        assert sum(num_attempts - 1 for _, num_attempts in made) == sum(member.num_failures for member in stage.members)
        stage.require_idle()

    for seed in range(4):
        run(scenario(Random(seed)))


def test_orders_to_the_pool_interrupt_groups_and_blame_neither_prompt_nor_instance() -> None:
    """Moved away, drained, removed and added again, again and again, while groups are under way."""

    async def scenario(rng: Random) -> None:
        stage = Stage(*(SamplingClient(f"http://m{i}:1") for i in range(3)))
        running = [asyncio.create_task(stage.rollout(3, 10 * i).run()) for i in range(6)]
        while not all(task.done() for task in running):
            requests = [request for member in stage.members for request in member.requests]
            if requests and rng.random() < 0.3:
                rng.choice(requests).move()
            if len(stage.members) > 1 and rng.random() < 0.05:
                stage.roster.remove(rng.choice(stage.members).name)
            await asyncio.sleep(0)
        for i, task in enumerate(running):
            require_samples(task.result()[0], 10 * i)
        assert all(member.state == "ready" and member.num_failures == 0 for member in stage.members)
        stage.require_idle()

    for seed in range(6):
        run(scenario(Random(seed)))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_no_instance_can_serve_is_raised_at_once_and_its_siblings_end(status: int) -> None:
    async def scenario() -> None:
        refusal = failing(lambda: RequestInvalid("too long", status))
        clients = [SamplingClient("http://a:1", lambda: (0, refusal)), SamplingClient("http://b:1")]
        stage = Stage(*clients)
        with pytest.raises(RequestInvalid, match="too long"):
            await stage.rollout(4).run()
        assert clients[0].num_requests == 1 and [member.state for member in stage.members] == ["ready", "ready"]
        stage.require_idle()

    run(scenario())


@pytest.mark.parametrize("num_instances", [3, 5])
def test_a_prompt_that_three_instances_refuse_fails_by_name_and_they_stay(num_instances: int) -> None:
    async def scenario() -> None:
        clients = [SamplingClient(f"http://m{i}:1", lambda: (0, FAULTS["500"])) for i in range(num_instances)]
        stage = Stage(*clients)
        with pytest.raises(PromptFailed, match=r"'v1-0' of 2 prompt tokens failed 3 times in a row, on 3 instances"):
            await stage.rollout(2).run()
        assert sorted(client.num_requests for client in clients)[-3:] == [1, 1, 1], "each got it once"
        assert all(member.state == "ready" for member in stage.members)
        stage.require_idle()

    run(scenario())


def test_tokens_that_are_taken_back_each_time_are_no_progress() -> None:
    async def scenario() -> None:
        taken_back = failing(lambda: InstanceTooSlow("slow"), cuts=True)
        stage = Stage(SamplingClient("http://a:1", lambda: (3, taken_back)))
        with pytest.raises(PromptFailed, match=f"failed {MAX_FAILURES} times in a row, on 1 instances"):
            await stage.rollout(1, LONG).run()
        assert stage.members[0].num_failures == MAX_FAILURES
        stage.require_idle()

    run(scenario())


def test_progress_by_a_token_each_time_comes_to_an_end_however_often_it_fails() -> None:
    async def scenario() -> None:
        stage = Stage(SamplingClient("http://a:1", lambda: (1, FAULTS["slow"])))
        (response,), num_attempts = await stage.rollout(1, LONG).run()
        require_samples([response], LONG)
        assert num_attempts == len(response.token_ids) == 1 + response.num_continued > MAX_FAILURES
        assert response.num_resampled == 0

    run(scenario())


@pytest.mark.parametrize(("n", "most", "sizes"), [(72, 64, [64, 8]), (64, 64, [64]), (9, 4, [4, 4, 1]), (3, None, [3])])
def test_a_group_larger_than_an_instance_generates_at_once_is_asked_for_in_requests_that_fit(
    n: int, most: int | None, sizes: list[int]
) -> None:
    async def scenario() -> None:
        client = SamplingClient("http://a:1")
        client.max_concurrency = most
        stage = Stage(client)
        responses, num_attempts = await stage.rollout(n).run()
        require_samples(responses, 0)
        assert len(responses) == n and num_attempts == 1
        assert sorted(client.sizes, reverse=True) == sizes
        stage.require_idle()

    run(scenario())


@pytest.mark.parametrize(("last", "num_tokens", "reason"), [(6, MAX_TOKENS, "length"), (1, 5, "stop"), (9, 5, "stop")])
def test_a_response_with_all_its_tokens_is_not_asked_for_again_because_its_end_was_not_told(
    last: int, num_tokens: int, reason: str
) -> None:
    """1 is an end token of the model, 9 one of the request."""

    async def scenario() -> None:
        client = SamplingClient("http://a:1")
        stage = Stage(client)
        model = ModelTokens(60, (1,), lambda token_ids, skip: "")
        sampling = model.completed(SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=[9], seed=0))
        rollout = GroupRollout(stage.roster, PROMPT, sampling, "v1-0", "v1", 10.0)
        (partial,) = rollout._partials
        partial.token_ids.extend([5] * (num_tokens - 1))
        partial.logprobs.extend([-1.0] * (num_tokens - 1))
        client.tells_ends = False
        client._extend = lambda partial, *_: (partial.token_ids.append(last), partial.logprobs.append(-1.0))  # type: ignore
        (response,), num_attempts = await rollout.run()
        assert (response.finish_reason, response.instance) == (reason, client.url)
        assert len(response.token_ids) == num_tokens and client.num_requests == 1 and num_attempts == 2

    run(scenario())


@pytest.mark.parametrize("shows_nothing", ["slow", "moved", "invalid"])
def test_a_trial_that_shows_nothing_of_its_instance_is_not_the_last_one(shows_nothing: str) -> None:
    """A request that was slow, moved or invalid itself is over like any other: the only instance must not be lost."""

    async def scenario() -> None:
        refusal = failing(lambda: RequestInvalid("too long", 400))
        faults = {"slow": [FAULTS["slow"]], "moved": [], "invalid": [refusal]}[shows_nothing]
        stage = Stage(SamplingClient("http://a:1", lambda: (0, faults.pop()) if faults else None))
        (member,) = stage.members
        member.circuit.failed(0.0, 0.0, "long ago")
        task = asyncio.create_task(stage.rollout(1, LONG).run())
        while not member.requests:
            await asyncio.sleep(0)
        if shows_nothing == "moved":
            # Before it was sent, so that no token closes the circuit.
            next(iter(member.requests)).move()
        if shows_nothing == "invalid":
            with pytest.raises(RequestInvalid):
                await task
            task = asyncio.create_task(stage.rollout(1, LONG).run())
        (response,), _ = await task
        require_samples([response], LONG)
        assert member.circuit.is_closed

    run(scenario())


def test_a_trial_that_takes_long_is_waited_for_beyond_the_pools_timeout() -> None:
    """The only instance generates, but says so only at its end, like one that does not stream."""

    class Silent(SamplingClient):
        async def generate(self, *args: Any, on_progress: Any = None, **names: Any) -> None:
            await answers.wait()
            await super().generate(*args, on_progress=None, **names)

    answers = asyncio.Event()

    async def scenario() -> None:
        stage = Stage(Silent("http://a:1"), timeout_s=60.0)
        (member,) = stage.members
        watch = HealthWatch(stage.roster, LateJoiners(stage.roster), PoolSection(timeout_s=60.0))
        member.circuit.failed(0.0, 0.0, "long ago")
        tasks = [asyncio.create_task(stage.rollout(1, seed).run()) for seed in (LONG, 0)]
        for _ in range(5):
            watch._require_somebody()
            await asyncio.sleep(60.0)
        assert member.circuit.is_tried and stage.roster.router.is_waited_for
        answers.set()
        for task, seed in zip(tasks, (LONG, 0), strict=True):
            require_samples((await task)[0], seed)
        member.circuit.failed(time.monotonic(), time.monotonic(), "gone")
        task = asyncio.create_task(stage.rollout(1).run())
        with pytest.raises(NoInstanceLeft):
            while not task.done():
                watch._require_somebody()
                await asyncio.sleep(INTERVAL_WITHOUT_S)
            await task

    run(scenario())


@pytest.mark.parametrize("num_steps", range(8))
def test_a_group_that_is_called_off_leaves_nothing_behind(num_steps: int) -> None:
    async def scenario() -> None:
        stage = Stage(*(SamplingClient(f"http://m{i}:1") for i in range(2)))
        stage.members[0].circuit.failed(0.0, 0.0, "long ago")
        task = asyncio.create_task(stage.rollout(4).run())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stage.require_idle()
        assert all(member.takes("v1") for member in stage.members), "a trial that was called off may be made again"
        require_samples((await stage.rollout(4).run())[0], 0)

    run(scenario())


def test_a_pool_without_instances_ends_groups_that_wait_and_those_under_way() -> None:
    async def scenario() -> None:
        stage = Stage(SamplingClient("http://a:1"))
        task = asyncio.create_task(stage.rollout(2, 0).run())
        while not stage.members[0].requests:
            await asyncio.sleep(0)
        member = stage.members[0]
        stage.roster.note_lost(member, "it is silent")
        while not stage.roster.router.is_waited_for:
            await asyncio.sleep(0)
        assert member.num_failures == 1 and not member.requests
        stage.roster.router.fail(NoInstanceLeft("all gone"))
        with pytest.raises(NoInstanceLeft):
            await task
        stage.require_idle()

    run(scenario())
