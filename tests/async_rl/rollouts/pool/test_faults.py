"""What a fault costs a pool of scripted instances."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.errors import NoInstanceLeft
from async_rl.method.types import Response
from async_rl.rollouts.pool.group_rollout import MAX_FAILURES
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.pools import DEADLINE_S, Pools
from tests.support.scripted_instance import sample

SAMPLING = SamplingParams(n=2, max_tokens=8, seed=0, logprobs=0)


@pytest.fixture
def stage(pools_with: Callable[..., Pools]) -> Pools:
    return pools_with(timeout_s=20.0, request_timeout_s=20.0)


async def groups(
    pool: InferencePool, count: int, sampling: SamplingParams = SAMPLING, prompt: tuple[int, ...] = (3, 4)
) -> list[tuple[list[Response], int]]:
    sampled = (
        pool.generate_group(prompt, sampling.model_copy(update={"seed": 4096 * i}), f"v1-{i}", "v1")
        for i in range(count)
    )
    return await asyncio.gather(*sampled)


def expected(seed: int, max_tokens: int = SAMPLING.max_tokens) -> tuple[int, ...]:
    return tuple(sample(seed, 2, max_tokens)[0])


def states(pool: InferencePool) -> list[str]:
    return [member.state for member in pool.members]


def require_exact(answers: list[tuple[list[Response], int]], max_tokens: int = SAMPLING.max_tokens) -> None:
    for i, (responses, _) in enumerate(answers):
        assert [r.token_ids for r in responses] == [expected(4096 * i + j, max_tokens) for j in range(len(responses))]


@pytest.mark.distributed
@pytest.mark.parametrize("owner", ["async-rl", "vllm"])
def test_one_that_is_taken_in_during_a_publish_is_asked_what_it_speaks(instances, stage: Pools, owner: str) -> None:
    """It was removed and came back while it received the weights. Taken for another kind of server it would be sent
    requests without seeds, and draw other samples than those of the run."""
    first, second = instances({"stream": True}, {"stream": True, "owner": owner})
    pool = stage.make(first)
    stage.loop.run(pool.begin_publish())
    stage.call(pool.add, second.url)
    stage.loop.run(pool.end_publish("v1", [second.url]))
    assert states(pool) == ["stale", "ready"]
    stage.loop.run(groups(pool, 1))
    (request,) = second.seen()["requests"]
    assert request["sampling_params"].get("seed") == (0 if owner == "async-rl" else None)


@pytest.mark.distributed
def test_one_that_came_during_a_publish_and_is_too_small_for_the_run_is_left_out(instances, stage: Pools) -> None:
    first, second = instances({"stream": True}, {"stream": True, "max_model_len": 8})
    pool = stage.make(first)
    pool.min_model_len = 64
    stage.loop.run(pool.begin_publish())
    stage.call(pool.add, second.url)
    stage.loop.run(pool.end_publish("v1", [first.url, second.url]))
    assert pool.find(first.url).state == "ready" and pool.find(second.url).state != "ready"
    assert "its model takes 8 tokens" in (pool.find(second.url).reason or "")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "script", [{"flood": True}, {"surplus": 1}, {"bad_logprob": float("nan")}, {"bad_logprob": 5.0}]
)
def test_one_that_does_not_do_what_it_is_asked_to_leaves_and_the_others_sample_everything(
    instances, stage: Pools, script: dict[str, Any]
) -> None:
    broken, sound = instances({"stream": True, **script}, {"stream": True})
    pool = stage.make(broken, sound)
    require_exact(stage.loop.run(groups(pool, 24)))
    assert states(pool) == ["stale", "ready"]
    assert "the server does not do what it is asked to" in (pool.find(broken.url).reason or "")


@pytest.mark.distributed
def test_a_flood_of_tokens_from_the_only_instance_ends_in_its_name(instances, stage: Pools) -> None:
    (broken,) = instances({"stream": True, "flood": True})
    pool = stage.make(broken, timeout_s=3.0)
    with pytest.raises(NoInstanceLeft, match=r"(?s)before the next publish.*more than the 8 tokens asked for"):
        stage.loop.run(groups(pool, 4))


@pytest.mark.distributed
@pytest.mark.parametrize("status", [503, 500, 502, 429])
def test_server_errors_that_pass_cost_no_instance_its_service(instances, stage: Pools, status: int) -> None:
    busy = {"stream": True, "busy_at": [1], "busy_status": status}
    pool = stage.make(*instances(busy, busy, busy, {"stream": True}))
    answers = stage.loop.run(groups(pool, 24))
    require_exact(answers)
    assert states(pool) == ["ready"] * 4
    assert sum(attempts - 1 for _, attempts in answers) == 3
    assert all(member.num_tokens for member in pool.members)


@pytest.mark.distributed
def test_one_broken_connection_ends_no_other_request(instances, stage: Pools) -> None:
    torn, other = instances(
        {"stream": True, "token_s": 0.1, "stop_after": 1, "fate": "tear", "fate_of": "v1-3-1"},
        {"stream": True, "token_s": 0.1},
    )
    pool = stage.make(torn, other)
    answers = stage.loop.run(groups(pool, 20))
    require_exact(answers)
    assert states(pool) == ["ready", "ready"]
    assert sum(attempts - 1 for _, attempts in answers) <= 1
    assert torn.seen()["num_cancelled"] + other.seen()["num_cancelled"] <= 1


@pytest.mark.distributed
def test_a_listed_instance_that_restarts_behind_its_url_credits_nothing_to_the_version(instances, stage: Pools) -> None:
    """As vLLM, which tells versions at the end: a first process dies amid a response, and so does the next one."""
    dying = {"stream": True, "token_s": 0.05, "versions_at_end": True, "owner": "vllm", "stop_after": 2, "fate": "die"}
    first, sound = instances(dying, {"stream": True, "version": "v1", "delay_s": 1.0})
    pool = stage.make(first, sound)
    stage.wait_for(lambda: states(pool) == ["ready", "ready"])
    running = stage.loop.submit(groups(pool, 2, SamplingParams(n=1, max_tokens=40, seed=0, logprobs=0)))
    stage.wait_for(lambda: first.process.poll() is not None)
    port = int(first.url.rsplit(":", 1)[1])
    (second,) = instances(dying | {"port": port, "version": "default", "fate": None})
    assert second.url == first.url
    for responses, _ in running.result(DEADLINE_S):
        assert responses[0].weight_versions == {"v1"}
    stage.wait_for(lambda: "started anew" in (pool.members[0].reason or "") or states(pool)[0] == "joining")
    assert second.seen()["requests"] == [] or states(pool)[0] != "ready"


@pytest.mark.distributed
def test_to_remove_an_instance_and_add_it_again_does_not_bring_it_back(instances, stage: Pools) -> None:
    lying, sound = instances({"stale": "v0"}, {})
    pool = stage.make(lying, sound)
    stage.loop.run(groups(pool, 4))
    assert states(pool) == ["stale", "ready"]
    stage.call(pool.remove, lying.url)
    member = stage.call(pool.add, lying.url)
    seen_s = member.last_seen_s
    stage.wait_for(lambda: member.last_seen_s > seen_s + 1.0)
    assert member.state == "joining", "it says that it holds v1, and failed for it"


@pytest.mark.distributed
def test_an_instance_list_that_flaps_ends_no_run_and_blames_no_prompt(instances, stage: Pools) -> None:
    """More often than a prompt may fail, while nothing has a token yet; at times nobody is listed at all."""
    (instance,) = instances({"stream": True, "delay_s": 1.0})
    pool = stage.make(instance)
    running = stage.loop.submit(groups(pool, 1))
    for _ in range(MAX_FAILURES + 1):
        stage.wait_for(lambda: bool(pool.members[0].requests))
        stage.call(pool.remove, instance.url)
        assert not running.done()
        stage.call(pool.add, instance.url)
    require_exact(running.result(DEADLINE_S))


@pytest.mark.distributed
def test_health_errors_that_pass_do_not_end_service(instances, stage: Pools) -> None:
    (instance,) = instances({"stream": True})
    pool = stage.make(instance)
    instance.rescript(health=503)
    before = len(instance.seen()["calls"])
    stage.wait_for(lambda: instance.seen()["calls"][before:].count("/health") >= 2)
    assert states(pool) == ["ready"]
    instance.rescript(health=200)
    require_exact(stage.loop.run(groups(pool, 2)))
