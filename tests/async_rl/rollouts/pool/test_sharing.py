"""Who does how much of a batch. In counts of groups, not in seconds: the machine may be busy with other things."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.method.types import Response
from async_rl.rollouts.pool.inference_pool import InferencePool
from async_rl.rollouts.pool.member import Member
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.protocol.inference import SamplingParams
from tests.support.pools import Pools

NUM_GROUPS = 60
SAMPLING = SamplingParams(n=2, max_tokens=8, seed=0, logprobs=0)


class Batch:
    """A batch under way at a pool of scripted instances; groups count as they finish."""

    def __init__(self, pool: InferencePool, loop: EventLoopThread) -> None:
        self.num_finished = 0
        self.at = asyncio.Event()
        self._pool = pool
        self._loop = loop

    async def run(self, count: int, when: int, act: Callable[[], None]) -> list[list[Response]]:
        async def one(i: int) -> list[Response]:
            sampling = SAMPLING.model_copy(update={"seed": 4096 * i})
            responses, _ = await self._pool.generate_group((3, 4), sampling, f"v1-{i}", "v1")
            self.num_finished += 1
            if self.num_finished == when:
                act()
            return responses

        return await asyncio.gather(*(one(i) for i in range(count)))


@pytest.fixture
def make_pool_of(pools_with: Callable[..., Pools]) -> Callable[..., InferencePool]:
    return pools_with(timeout_s=60.0).make


def served(instances: list[Any]) -> list[int]:
    return [len(instance.seen()["requests"]) for instance in instances]


@pytest.mark.distributed
@pytest.mark.parametrize("delay_s", [0.3])
def test_one_that_joins_at_a_fifth_of_a_batch_carries_its_share_and_the_batch_ends_sooner_by_it(
    instances, make_pool_of, loop: EventLoopThread, delay_s: float
) -> None:
    """Three instances of one speed, two requests at a time each. Two alone would serve 30 groups each. With a third
    from 12 finished groups on, each of the two serves 6 + 48 / 3 = 22: the batch takes 22 / 30 = 0.73 of the time.

    Requests that are under way at the join, and the time that it takes, move a few groups: at most 4 to a side.
    """
    script = {"delay_s": delay_s, "concurrency": 4}
    first, second, late = instances(script, script, script)
    pool = make_pool_of(first, second)

    async def admit(member: Member) -> None:
        return

    pool.late_joiners.admit = admit
    batch = Batch(pool, loop)
    answers = loop.run(
        batch.run(NUM_GROUPS, NUM_GROUPS // 5, lambda: pool.register(late.url, "late", "boot-1") and None)
    )
    assert len(answers) == NUM_GROUPS
    counts = served([first, second, late])
    assert sum(counts) == NUM_GROUPS, "nothing was asked for twice"
    assert counts[2] >= 12, f"its share of the 48 groups left is 16: {counts}"
    assert max(counts[:2]) <= 26, f"the others were to serve 22 each: {counts}"


@pytest.mark.distributed
def test_with_the_defaults_a_batch_is_not_placed_at_once(instances, make_pool_of, loop: EventLoopThread) -> None:
    """200 groups of 2 on two instances that tell nothing: a joiner of before got none of them."""
    script = {"delay_s": 1.0}
    first, second, late = instances(script, script, script)
    pool = make_pool_of(first, second)

    async def admit(member: Member) -> None:
        return

    pool.late_joiners.admit = admit
    batch = Batch(pool, loop)
    loop.run(batch.run(200, 1, lambda: pool.register(late.url, "late", "boot-1") and None))
    counts = served([first, second, late])
    assert sum(counts) == 200
    # 16 groups each at first, and again with each second: the joiner is there after two such rounds at the latest.
    assert counts[2] >= 200 // 8, counts


@pytest.mark.distributed
def test_what_waits_in_the_queue_of_one_is_taken_over_by_another_without_a_token_lost(
    instances, make_pool_of, loop: EventLoopThread
) -> None:
    """The first one works at one request at a time, and got 16 groups before that could be seen."""
    slow, late = instances({"stream": True, "token_s": 0.3, "slots": 1}, {"stream": True})
    pool = make_pool_of(slow)

    async def admit(member: Member) -> None:
        return

    pool.late_joiners.admit = admit
    batch = Batch(pool, loop)
    answers = loop.run(batch.run(16, 1, lambda: pool.register(late.url, "late", "boot-1") and None))
    by = [{response.instance for response in responses} for responses in answers]
    num_late = sum(urls == {late.url} for urls in by)
    assert num_late >= 8, f"the slow one was to keep what it had begun: {num_late}"
    assert all(response.num_continued == response.num_resampled == 0 for group in answers for response in group)
    assert all(len(urls) == 1 for urls in by), "a group is whole at one instance"
