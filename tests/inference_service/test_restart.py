"""A listed instance, of real processes, that is killed in mid-stream and started again behind the same URL."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config.pool_section import PoolSection
from async_rl.method.types import Response
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.running_instance import Instance
from tests.support.waiting import wait_for

DEADLINE_S = 120.0
NUM_GROUPS = 4
VERSION = "default"
"""What every process says of itself from its start on: the version in training is told apart by the process alone."""
SAMPLING = SamplingParams(n=2, max_tokens=200, min_tokens=200, seed=0, logprobs=0)


async def groups(pool: InferencePool, first: int) -> list[Response]:
    sampled = (
        pool.generate_group((5, 6, 7), SAMPLING.model_copy(update={"seed": 4096 * i}), f"r{i}", VERSION)
        for i in range(first, first + NUM_GROUPS)
    )
    return [response for responses, _ in await asyncio.gather(*sampled) for response in responses]


@pytest.mark.distributed
def test_no_token_is_taken_from_a_process_that_follows_behind_the_same_url(
    instance: Instance, launch_instance: Callable[..., Instance], tiny_model: Callable[..., Path]
) -> None:
    """The second process serves another model and claims the same version."""
    first = launch_instance(tiny_model("qwen3"))
    port = first.url.rpartition(":")[2]
    loop = EventLoopThread()
    pool = InferencePool(PoolSection(instances=(first.url, instance.url)))

    async def kill_in_mid_stream() -> None:
        member = pool.find(first.url)
        while not (member.num_open and member.num_tokens):
            await asyncio.sleep(0)
        first.process.kill()

    async def both() -> list[Response]:
        responses, _ = await asyncio.gather(groups(pool, 0), kill_in_mid_stream())
        return responses

    try:
        loop.run(pool.wait_until_ready())
        loop.run(pool.begin_publish())
        loop.run(pool.end_publish(VERSION, (first.url, instance.url)))
        assert [member.state for member in pool.members] == ["ready", "ready"]
        hurt = loop.submit(both()).result(DEADLINE_S)
        first.process.wait()
        second = launch_instance(tiny_model("qwen3", seed=7), "--port", port)
        assert second.url == first.url
        wait_for(lambda: pool.members[0].state == "joining", said=lambda: pool.members[0].reason)
        after = loop.submit(groups(pool, 0)).result(DEADLINE_S)
    finally:
        loop.run(pool.close())
        loop.close()
    assert any(response.num_continued for response in hurt)
    assert {response.instance for response in after} == {instance.url}
    assert [response.token_ids for response in hurt] == [response.token_ids for response in after]
