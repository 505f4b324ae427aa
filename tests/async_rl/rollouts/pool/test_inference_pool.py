import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.errors import ConfigError, Fenced, InstanceError, NoInstanceLeft, UnknownInstance
from async_rl.method.types import Response
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.pools import DEADLINE_S, Pools
from tests.support.scripted_instance import sample

pytestmark = pytest.mark.distributed

SAMPLING = SamplingParams(n=2, max_tokens=8, seed=4096, logprobs=0)
LONG = SamplingParams(n=4, max_tokens=40, seed=4096, logprobs=0)
CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def pools(pools_with: Callable[..., Pools]) -> Pools:
    return pools_with(timeout_s=1.0, request_timeout_s=30.0)


async def groups(
    pool: InferencePool, count: int, version: str = "v1", sampling: SamplingParams = SAMPLING
) -> list[tuple[list[Response], int]]:
    sampled = (
        pool.generate_group((3, 4), sampling.model_copy(update={"seed": 4096 * i}), f"{version}-{i}", version)
        for i in range(count)
    )
    return await asyncio.gather(*sampled)


def tokens(answers: list[tuple[list[Response], int]]) -> list[list[tuple[int, ...]]]:
    return [[response.token_ids for response in group] for group, _ in answers]


def states(pool: InferencePool) -> list[str]:
    return [member.state for member in pool.members]


# What becomes of a group when its instance fails


@pytest.mark.parametrize("stream", [True, False])
def test_another_instance_takes_over_from_one_that_dies_and_draws_the_same_samples(
    instances, pools: Pools, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    dying_at = {"die_at": 2} if not stream else {"stop_after": 5, "fate": "die"}
    whole, dying = instances({"stream": stream, "delay_s": 0.05}, {"stream": stream, "delay_s": 0.05, **dying_at})
    undisturbed = pools.loop.run(groups(pools.make(whole), 8, sampling=LONG))
    pool = pools.make(dying, whole)
    # As the first answer shows it.
    pool.members[0].client.streams = stream
    with caplog.at_level(logging.WARNING):
        disturbed = pools.loop.run(groups(pool, 8, sampling=LONG))
    assert tokens(disturbed) == tokens(undisturbed)
    pools.wait_for(lambda: states(pool) == ["dead", "ready"])
    pools.wait_for(lambda: f"{dying.url} leaves service, 1 of 2 left" in caplog.text)
    responses = [response for group, _ in disturbed for response in group]
    assert (sum(r.num_continued for r in responses) > 0) == stream
    assert (sum(r.num_resampled for r in responses) > 0) != stream
    assert sum(attempts > 1 for _, attempts in disturbed) > 0


def test_what_was_finished_before_the_instance_died_is_not_asked_for_again(instances, pools: Pools) -> None:
    dying, whole = instances({"stream": True, "stop_after": 5, "fate": "die"}, {"stream": True})
    pool = pools.make(dying, whole)
    ((responses, _),) = pools.loop.run(groups(pool, 1, sampling=LONG))
    finished_first = [r for r in responses if len(r.token_ids) <= 5]
    continued = [r for r in responses if len(r.token_ids) > 5]
    assert finished_first and continued
    assert {r.instance for r in finished_first} == {dying.url}
    assert [r.num_continued for r in continued] == [1] * len(continued)
    asked = whole.seen()["requests"]
    assert [len(request["token_ids"]) for request in asked] == [2 + 5] * len(continued)


@pytest.mark.parametrize("script", [{"stale": "v0"}, {"refuse_at": 0}, {"abort_at": 0}, {"hang_at": 0}])
def test_instance_that_fails_a_request_leaves_service_and_the_group_goes_elsewhere(
    instances, pools: Pools, script: dict[str, Any]
) -> None:
    bad, good = instances(script, {})
    pool = pools.make(bad, good, request_timeout_s=2.0)
    ((responses, attempts),) = pools.loop.run(groups(pool, 1))
    assert attempts == 2 and good.url in {r.instance for r in responses}
    assert tokens([(responses, 1)]) == tokens(pools.loop.run(groups(pools.make(good), 1)))


def test_a_response_may_take_longer_than_the_timeout_as_long_as_tokens_come(instances, pools: Pools) -> None:
    slow, quick = instances({"stream": True, "token_s": 0.2}, {"stream": True})
    seed = next(seed for seed in range(4096) if len(sample(seed, 2, 40)[0]) >= 20)
    sampling = SamplingParams(n=1, max_tokens=40, seed=seed, logprobs=0)
    pool = pools.make(slow, request_timeout_s=2.0)
    begun = time.monotonic()
    responses, attempts = pools.loop.run(pool.generate_group((3, 4), sampling, "v1-0", "v1"))
    assert time.monotonic() - begun > 2.0 and attempts == 1
    expected, _ = pools.loop.run(pools.make(quick).generate_group((3, 4), sampling, "v1-0", "v1"))
    assert responses[0].token_ids == expected[0].token_ids


def test_a_response_that_stops_amid_its_tokens_goes_on_elsewhere(instances, pools: Pools) -> None:
    stuck, quick = instances({"stream": True, "stop_after": 3, "fate": "hang"}, {"stream": True})
    pool = pools.make(stuck, quick, request_timeout_s=2.0)
    ((responses, attempts),) = pools.loop.run(groups(pool, 1, sampling=LONG))
    assert attempts == 2 and max(r.num_continued for r in responses) == 1
    assert tokens([(responses, 1)]) == tokens(pools.loop.run(groups(pools.make(quick), 1, sampling=LONG)))


def test_an_instance_that_stands_still_is_given_up_long_before_its_requests_time_out(instances, pools: Pools) -> None:
    stopped, whole = instances({"stream": True, "token_s": 0.05}, {"stream": True})
    pool = pools.make(stopped, whole, request_timeout_s=100.0)
    running = pools.loop.submit(groups(pool, 2, sampling=LONG))
    pools.wait_for(lambda: stopped.seen()["requests"] != [])
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        assert tokens(running.result(DEADLINE_S)) == tokens(pools.loop.run(groups(pools.make(whole), 2, sampling=LONG)))
        pools.wait_for(lambda: states(pool) == ["dead", "ready"])
        assert "silent for" in (pool.members[0].reason or "")
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    pools.wait_for(lambda: states(pool) == ["ready", "ready"])


# Nobody left


def test_all_dead_is_a_named_error_within_the_timeout(instances, pools: Pools) -> None:
    two = instances({"die_at": 1}, {"stale": "v0"})
    pool = pools.make(*two, timeout_s=1.0)
    with pytest.raises(NoInstanceLeft) as caught:
        pools.loop.run(groups(pool, 6))
    assert f"{two[0].url}: instance {two[0].url} did not answer" in str(caught.value)
    assert f"{two[1].url}: instance {two[1].url}, choice 0 was sampled from weight version 'v0'" in str(caught.value)


def test_unreachable_instance_returns_if_it_still_holds_the_weights_but_not_for_ever(instances, pools: Pools) -> None:
    (instance,) = instances({"hang_at": 0})
    pool = pools.make(instance, request_timeout_s=1.5, timeout_s=3600)
    ((_, attempts),) = pools.loop.run(groups(pool, 1))
    assert attempts == 2 and states(pool) == ["ready"]
    for number in (2, 4):
        instance.rescript(hang_at=number)
        pools.loop.run(groups(pool, 1))
    instance.rescript(hang_at=6)
    with pytest.raises(NoInstanceLeft):
        pools.loop.run(groups(pool, 1))


def test_unreachable_instance_that_lost_the_weights_does_not_return(instances, pools: Pools) -> None:
    (instance,) = instances({"hang_at": 0})
    pool = pools.make(instance, request_timeout_s=0.3, timeout_s=2)
    instance.rescript(version="default")
    with pytest.raises(NoInstanceLeft, match="it holds weight version 'default'"):
        pools.loop.run(groups(pool, 1))


def test_a_group_waits_for_an_instance_that_joins(instances, pools: Pools, caplog: pytest.LogCaptureFixture) -> None:
    dying, late = instances({"die_at": 0}, {"version": "default"})
    pool = pools.make(dying, timeout_s=20)

    async def admit(member: Member) -> None:
        late.rescript(version="v1")

    pool.late_joiners.admit = admit
    with caplog.at_level(logging.INFO):
        running = pools.loop.submit(groups(pool, 1))
        pools.wait_for(lambda: "no instance is in service; waiting" in caplog.text)
        pools.call(pool.register, late.url, "late", "boot-1")
        ((responses, _),) = running.result(DEADLINE_S)
    assert {r.instance for r in responses} == {late.url}


# Who belongs to the pool


def test_exactly_the_named_instances_serve_a_published_version(instances, pools: Pools) -> None:
    first, second = instances({}, {})
    pool = pools.make(first, second)
    second.rescript(version="v2")
    pools.publish(pool, "v2", second.url)
    assert states(pool) == ["stale", "ready"] and "did not receive weight version 'v2'" in (
        pool.members[0].reason or ""
    )
    assert {r.instance for group, _ in pools.loop.run(groups(pool, 3, "v2")) for r in group} == {second.url}


def test_a_drained_instance_finishes_what_it_has_and_leaves(instances, pools: Pools) -> None:
    leaving, staying = instances({"delay_s": 0.5}, {})
    pool = pools.make(leaving, staying)
    running = pools.loop.submit(groups(pool, 2))
    pools.wait_for(lambda: leaving.seen()["requests"] != [])
    pools.call(pool.drain, leaving.url)
    assert states(pool) == ["draining", "ready"]
    assert {r.instance for group, _ in running.result(DEADLINE_S) for r in group} == {leaving.url, staying.url}
    pools.wait_for(lambda: len(pool.members) == 1)
    assert {r.instance for group, _ in pools.loop.run(groups(pool, 3)) for r in group} == {staying.url}


def test_a_drained_instance_that_fails_leaves_and_does_not_come_back(instances, pools: Pools) -> None:
    leaving, staying = instances({"stream": True, "token_s": 0.3}, {"stream": True})
    pool = pools.make(leaving, staying)
    running = pools.loop.submit(groups(pool, 2, sampling=LONG))
    pools.wait_for(lambda: leaving.seen()["requests"] != [])
    pools.call(pool.drain, leaving.url)
    leaving.kill()
    assert tokens(running.result(DEADLINE_S)) == tokens(pools.loop.run(groups(pools.make(staying), 2, sampling=LONG)))
    pools.wait_for(lambda: [member.url for member in pool.members] == [staying.url])


def test_a_removed_instance_leaves_at_once_and_its_groups_go_on_elsewhere(instances, pools: Pools) -> None:
    leaving, staying = instances({"stream": True, "token_s": 0.2}, {"stream": True})
    pool = pools.make(leaving, staying)
    running = pools.loop.submit(groups(pool, 2, sampling=LONG))
    pools.wait_for(lambda: leaving.seen()["requests"] != [])
    pools.call(pool.remove, leaving.url)
    assert tokens(running.result(DEADLINE_S)) == tokens(pools.loop.run(groups(pools.make(staying), 2, sampling=LONG)))
    with pytest.raises(UnknownInstance, match="it has 127"):
        pools.call(pool.find, leaving.url)


def test_a_registered_instance_joins_with_the_next_publish_and_is_told_to_leave_once_drained(
    instances, pools: Pools
) -> None:
    first, late = instances({}, {"version": "default"})
    pool = pools.make(first)
    member = pools.call(pool.register, late.url, "late", "boot-1")
    pools.wait_for(lambda: "it needs the next publish" in (member.reason or ""))
    assert member.state == "joining"
    for instance in (first, late):
        instance.rescript(version="v2")
    assert member in pools.publish(pool, "v2", first.url, late.url) and states(pool) == ["ready", "ready"]
    assert pools.call(pool.register, late.url, "late", "boot-1") is member
    pools.call(pool.drain, "late")
    pools.wait_for(lambda: len(pool.members) == 1)
    assert pools.call(pool.register, late.url, "late", "boot-1") is None
    assert pools.call(pool.register, late.url, "late", "boot-2").state == "joining", "a new process may come"


def test_an_instance_that_was_started_anew_has_no_weights(instances, pools: Pools) -> None:
    one, two = instances({"delay_s": 30}, {"version": "default"})
    pool = pools.make(version=None)
    pools.call(pool.register, one.url, "a", "boot-1")
    pools.loop.run(pool.wait_until_ready())
    pools.publish(pool, "v1", one.url)
    running = pools.loop.submit(groups(pool, 1))
    pools.wait_for(lambda: one.seen()["requests"] != [])
    with pytest.raises(ConfigError, match="called 'a' already, which answers at"):
        pools.call(pool.register, two.url, "a", "boot-2")
    one.kill()
    pool.members[0].last_seen_s -= 10
    member = pools.call(pool.register, two.url, "a", "boot-2")
    assert [member] == list(pool.members) and member.state == "joining" and member.version is None
    with pytest.raises(NoInstanceLeft):
        running.result(DEADLINE_S)


def test_a_refused_admission_is_not_tried_again_with_the_same_version(instances, pools: Pools) -> None:
    first, late = instances({}, {"version": "default"})
    pool = pools.make(first)
    tried: list[str] = []

    async def admit(member: Member) -> None:
        tried.append(member.name)
        raise InstanceError("no room")

    pool.late_joiners.admit = admit
    member = pools.call(pool.register, late.url, "late", "boot-1")
    pools.wait_for(lambda: member.state == "stale")
    assert tried == ["late"] and member.reason == "it could not join: no room"
    assert states(pool)[0] == "ready"


def test_an_instance_that_is_too_small_does_not_serve(instances, pools: Pools) -> None:
    first, late = instances({"max_model_len": 64}, {"max_model_len": 10})
    pool = pools.make(first)
    pool.min_model_len = 20
    member = pools.call(pool.register, late.url, "late", "boot-1")
    pools.wait_for(lambda: "takes 10 tokens, this run needs 20" in (member.reason or ""))
    assert member.state == "joining"


def test_wait_until_ready_waits_for_the_last_instance(instances, pools: Pools, caplog) -> None:
    first, second = instances({"max_model_len": 100}, {"health": 503, "max_model_len": 80})
    pool = pools.make(first, second, version=None, timeout_s=30)
    with caplog.at_level(logging.INFO):
        waiting = pools.loop.submit(pool.wait_until_ready())
        # It was asked again, after the other one had answered all that it is asked.
        pools.wait_for(lambda: "/v1/models" in first.seen()["calls"])
        num_before = second.seen()["calls"].count("/health")
        pools.wait_for(lambda: second.seen()["calls"].count("/health") >= num_before + 2)
        assert not waiting.done()
        second.rescript(health=200)
        waiting.result(60)
    assert f"waiting for {second.url}" in caplog.text and pool.max_model_len == 80


def test_a_run_does_not_wait_for_an_instance_that_only_its_weights_will_mend(instances, pools: Pools) -> None:
    """An earlier trainer was killed in the middle of a broadcast: to wait for health here is to wait for ever."""
    (broken,) = instances({"needs_weights": True, "max_model_len": 70})
    pool = pools.make(broken, version=None, timeout_s=3600)
    pools.loop.run(pool.wait_until_ready())
    assert pool.max_model_len == 70 and states(pool) == ["joining"]
    with pytest.raises(NoInstanceLeft, match="a stream broke"):  # An evaluation brings no weights.
        pools.loop.run(pools.make(broken, version=None, timeout_s=0.2).wait_until_ready(publishes=False))


def test_wait_until_ready_goes_on_with_those_that_are(instances, pools: Pools) -> None:
    (instance,) = instances({})
    pools.loop.run(pools.make(instance, CLOSED, version=None, timeout_s=0.2).wait_until_ready())
    with pytest.raises(NoInstanceLeft, match=f"(?s)no instance became healthy within 0.2 s.*{CLOSED}"):
        pools.loop.run(pools.make(CLOSED, version=None, timeout_s=0.2).wait_until_ready())


def test_a_pool_without_a_way_to_find_instances_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pool\.instances is empty"):
        InferencePool(PoolSection())


def test_an_instance_that_serves_another_trainer_ends_the_rollouts_and_stays_blameless(
    instances, pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    (instance,) = instances({})
    pool = pools.make(instance)
    instance.rescript(fenced=True)
    with pytest.raises(Fenced, match="serves the trainer that has taken over this run"):
        pools.loop.run(groups(pool, 3))
    (member,) = pool.members
    assert member.state == "ready" and member.circuit.is_closed
    num_before = instance.seen()["calls"].count("/health")
    pools.wait_for(lambda: instance.seen()["calls"].count("/health") >= num_before + 2)
    assert "watch of" not in caplog.text, "its health check goes on"


def test_every_request_tells_the_trainers_term(instances, pools: Pools) -> None:
    (instance,) = instances({})
    pool = InferencePool(PoolSection(instances=(instance.url,), timeout_s=5.0), None, "run-a:7")
    pools.made.append(pool)
    pools.loop.run(pool.wait_until_ready())
    pools.publish(pool, "v1", instance.url)
    pools.loop.run(groups(pool, 2))
    assert set(instance.seen()["terms"]) == {"run-a:7"}
