import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from async_rl.config import PoolSection
from async_rl.errors import ConfigError, InstanceRefused, NoInstanceLeft
from async_rl.event_loop import EventLoopThread
from async_rl.pool import InferencePool
from async_rl.protocol import SamplingParams
from async_rl.types import Response

SAMPLING = SamplingParams(n=2, max_tokens=8, seed=4096, logprobs=0)
CLOSED = "http://127.0.0.1:9"


@pytest.fixture
def make_pool(loop: EventLoopThread) -> Iterator[Callable[..., InferencePool]]:
    pools: list[InferencePool] = []

    def make(*instances: Any, version: str | None = "v1", **options: Any) -> InferencePool:
        urls = tuple(instance if isinstance(instance, str) else instance.url for instance in instances)
        pool = InferencePool(PoolSection(instances=urls, **({"timeout_s": 1.0, "request_timeout_s": 5.0} | options)))
        pools.append(pool)
        if version is not None:
            pool.set_version(version, urls)
        return pool

    yield make
    for pool in pools:
        loop.run(pool.close())


async def groups(pool: InferencePool, count: int, version: str = "v1") -> list[tuple[list[Response], int]]:
    sampled = (
        pool.generate_group((3, 4), SAMPLING.model_copy(update={"seed": 4096 * i}), f"{version}-{i}", version)
        for i in range(count)
    )
    return await asyncio.gather(*sampled)


def reasons(pool: InferencePool) -> list[str | None]:
    return [member.out_of_service for member in pool.members]


def test_groups_go_to_the_instance_with_the_fewest_outstanding_tokens(instances, make_pool, loop) -> None:
    pool = make_pool(*(two := instances({"delay_s": 0.2}, {"delay_s": 0.2})))
    loop.run(groups(pool, 6))
    assert [len(instance.seen()["requests"]) for instance in two] == [3, 3]
    assert [member.outstanding_tokens for member in pool.members] == [0, 0]


def test_another_instance_takes_over_from_one_that_dies_and_draws_the_same_samples(
    instances, make_pool, loop, caplog: pytest.LogCaptureFixture
) -> None:
    whole, dying = instances({"delay_s": 0.05}, {"delay_s": 0.05, "die_at": 2})
    undisturbed = loop.run(groups(make_pool(whole), 8))
    pool = make_pool(dying, whole)
    with caplog.at_level(logging.WARNING):
        disturbed = loop.run(groups(pool, 8))
    assert [[r.token_ids for r in group] for group, _ in disturbed] == [
        [r.token_ids for r in group] for group, _ in undisturbed
    ]
    assert sorted({attempts for _, attempts in disturbed}) == [1, 2]
    assert reasons(pool)[1] is None and "did not answer" in reasons(pool)[0]
    assert f"{dying.url} leaves service, 1 of 2 left" in caplog.text


@pytest.mark.parametrize("script", [{"stale": "v0"}, {"refuse_at": 0}, {"abort_at": 0}, {"hang_at": 0}])
def test_instance_that_fails_a_request_leaves_service_and_the_group_goes_elsewhere(
    instances, make_pool, loop, script: dict[str, Any]
) -> None:
    bad, good = instances(script, {})
    pool = make_pool(bad, good, request_timeout_s=0.5)
    ((responses, attempts),) = loop.run(groups(pool, 1))
    assert attempts == 2 and {r.instance for r in responses} == {good.url}
    assert reasons(pool)[0] is not None and reasons(pool)[1] is None
    assert bad.seen()["requests"][0] == good.seen()["requests"][0]


def test_request_that_no_instance_can_serve_is_raised_at_once(instances, make_pool, loop) -> None:
    pool = make_pool(*(two := instances({}, {})))
    sampling = SAMPLING.model_copy(update={"max_tokens": 1000})
    with pytest.raises(InstanceRefused, match="longer than the model"):
        loop.run(pool.generate_group((3,), sampling, "v1-0", "v1"))
    assert reasons(pool) == [None, None]
    assert sorted(len(instance.seen()["calls"]) for instance in two) == [0, 1]


def test_all_dead_is_a_named_error_within_the_timeout(instances, make_pool, loop) -> None:
    two = instances({"die_at": 1}, {"stale": "v0"})
    pool = make_pool(*two, timeout_s=1.0)
    begun = time.monotonic()
    with pytest.raises(NoInstanceLeft) as caught:
        loop.run(groups(pool, 6))
    assert time.monotonic() - begun < 3
    assert f"{two[0].url}: instance {two[0].url} did not answer" in str(caught.value)
    assert f"{two[1].url}: instance {two[1].url} sampled from weight version 'v0'" in str(caught.value)


def test_unreachable_instance_returns_if_it_still_holds_the_weights(instances, make_pool, loop) -> None:
    (instance,) = instances({"hang_at": 0})
    pool = make_pool(instance, request_timeout_s=0.3)
    ((_, attempts),) = loop.run(groups(pool, 1))
    assert attempts == 2 and reasons(pool) == [None]
    instance.rescript(hang_at=2)
    with pytest.raises(NoInstanceLeft):
        loop.run(groups(pool, 1))


def test_unreachable_instance_that_lost_the_weights_does_not_return(instances, make_pool, loop) -> None:
    (instance,) = instances({"hang_at": 0, "version": "default"})
    pool = make_pool(instance, request_timeout_s=0.3, timeout_s=60)
    begun = time.monotonic()
    with pytest.raises(NoInstanceLeft, match="it came back with weight version 'default'"):
        loop.run(groups(pool, 1))
    assert time.monotonic() - begun < 5


def test_set_version_puts_exactly_the_named_instances_in_service(instances, make_pool, loop) -> None:
    first, second = instances({}, {"version": "v2"})
    pool = make_pool(first, second)
    pool.set_version("v2", [second.url])
    assert "did not receive weight version 'v2'" in reasons(pool)[0] and reasons(pool)[1] is None
    assert {r.instance for group, _ in loop.run(groups(pool, 3, "v2")) for r in group} == {second.url}
    with pytest.raises(NoInstanceLeft, match="no instance serves weight version 'v1'"):
        loop.run(groups(pool, 1, "v1"))


def test_wait_until_ready_waits_for_the_last_instance(instances, make_pool, loop, caplog) -> None:
    first, second = instances({"max_model_len": 100}, {"health": 503, "max_model_len": 80})
    pool = make_pool(first, second, version=None, timeout_s=30)
    with caplog.at_level(logging.INFO):
        waiting = loop.submit(pool.wait_until_ready())
        time.sleep(0.3)
        assert not waiting.done()
        second.rescript(health=200)
        waiting.result(10)
    assert f"waiting for {second.url}" in caplog.text and pool.max_model_len == 80


def test_wait_until_ready_goes_on_with_those_that_are(instances, make_pool, loop) -> None:
    (instance,) = instances({})
    loop.run(make_pool(instance, CLOSED, version=None, timeout_s=0.2).wait_until_ready())
    with pytest.raises(NoInstanceLeft, match=f"(?s)no instance became healthy within 0.2 s.*{CLOSED}"):
        loop.run(make_pool(CLOSED, version=None, timeout_s=0.2).wait_until_ready())


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ((), "pool.instances is empty"),
        (("http://a:1", "http://a:1/"), "names an instance twice"),
        (("localhost:8000",), "'localhost:8000' is not a base URL"),
    ],
)
def test_instances_that_cannot_work_are_refused(urls: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferencePool(PoolSection(instances=urls))
