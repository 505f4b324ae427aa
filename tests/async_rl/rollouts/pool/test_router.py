"""The router alone, with members nothing is sent to: random pools and requests, some of them called off."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from async_rl.errors import NoInstanceLeft
from async_rl.rollouts.instance.partial_rollout import PartialRollout
from async_rl.rollouts.pool.member import QUEUE_S, GroupRequest, Member
from async_rl.rollouts.pool.router import MAX_PASSED_OVER, MUCH_MORE_LOADED, Cached, Router
from tests.support.members import ready_member

NUM_POOLS = 40
MAX_RESPONSES = 6
MAX_COST = 100


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Also fails where somebody waits for ever."""
    asyncio.run(asyncio.wait_for(scenario, 20.0))


async def rest() -> None:
    """Until everything that can go on has done so."""
    for _ in range(5):
        await asyncio.sleep(0)


class Load:
    """A random pool and a batch of requests for it; each is sent, worked at and released, or called off on the way."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.num_served = 0
        self.members = [self._member(i) for i in range(rng.randint(1, 5))]
        self.others = [ready_member("other", "v0"), ready_member("unknown", "")]
        """They serve nothing of the version in training, and must get nothing, however idle."""
        self.router = Router(lambda: [*self.others, *self.members])

    def _member(self, i: int) -> Member:
        return ready_member(
            f"m{i}", concurrency=self.rng.choice((1, 2, 7, None)), speed=self.rng.choice((None, 1.0, 50.0))
        )

    async def run(self, num_requests: int) -> None:
        tasks = [asyncio.create_task(self._request()) for _ in range(num_requests)]
        while not all(task.done() for task in tasks):
            self._check()
            if self.rng.random() < 0.1:
                self.rng.choice(tasks).cancel()
            await asyncio.sleep(0)
        for task in tasks:
            assert task.cancelled() or task.exception() is None
        self.num_served = sum(not task.cancelled() for task in tasks)

    async def _request(self) -> None:
        await self._work(self.rng.randrange(4))
        num_responses, cost = self.rng.randint(1, MAX_RESPONSES), self.rng.randint(1, MAX_COST)
        avoid = {member.url for member in self.members if self.rng.random() < 0.3}
        member = await self.router.acquire(cost, self.rng.random(), "v1", num_responses=num_responses, avoid=avoid)
        assert member in self.members
        request = GroupRequest([PartialRollout(i) for i in range(num_responses)], cost)
        member.begin(request)
        try:
            await self._work(self.rng.randrange(6))
        finally:
            member.end(request)
            self.router.release(member, cost)

    async def _work(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await asyncio.sleep(0)

    def _check(self) -> None:
        for member in self.members:
            told = member.credit.responses(member.client.max_concurrency)
            assert 0 <= member.num_open < told + MAX_RESPONSES, "only the last group goes beyond the credit"
            assert member.outstanding_tokens >= 0
        assert not any(member.outstanding_tokens for member in self.others)


def test_nobody_gets_more_than_its_share_all_are_served_and_nothing_leaks() -> None:
    for seed in range(NUM_POOLS):
        load = Load(Random(seed))
        run(load.run(25))
        assert load.num_served > 0
        assert [member.outstanding_tokens for member in load.members] == [0] * len(load.members)
        assert all(member.num_open == 0 and not member.requests for member in load.members)
        assert not load.router.is_waited_for and not load.router._promised


def test_the_longest_goes_first_and_among_equals_who_came_first() -> None:
    async def scenario(expected: Sequence[float]) -> None:
        member = ready_member("a", concurrency=1)
        router = Router(lambda: [member])
        served: list[int] = []

        async def ask(i: int) -> None:
            await router.acquire(10, expected[i], "v1")
            served.append(i)
            await asyncio.sleep(0)
            router.release(member, 10)

        await asyncio.gather(*(ask(i) for i in range(len(expected))))
        assert served == sorted(range(len(expected)), key=lambda i: -expected[i])

    rng = Random(0)
    for _ in range(20):
        run(scenario([float(rng.randrange(5)) for _ in range(12)]))


def test_an_avoided_instance_gets_it_only_where_no_other_serves() -> None:
    async def scenario() -> None:
        failed, other = ready_member("failed"), ready_member("other", concurrency=1)
        members = [failed, other]
        router = Router(lambda: members)
        assert await router.acquire(1, 1.0, "v1", avoid={failed.url}) is other
        other.begin(GroupRequest([PartialRollout(0)], 1))
        waiting = asyncio.create_task(router.acquire(1, 1.0, "v1", avoid={failed.url}))
        await rest()
        assert not waiting.done(), "the other is full, but serves"
        assert await router.acquire(1, 0.5, "v1") is failed, "who is passed over keeps nobody behind it waiting"
        members.remove(other)
        router.wake()
        assert await waiting is failed

    run(scenario())


def test_as_many_as_may_be_passed_over_do_not_keep_the_next_one_from_an_instance() -> None:
    async def scenario() -> None:
        failed, other = ready_member("failed"), ready_member("other", concurrency=1)
        router = Router(lambda: [failed, other])
        await router.acquire(1, 9.0, "v1", avoid={failed.url})
        other.begin(GroupRequest([PartialRollout(0)], 1))
        num_avoiding = MAX_PASSED_OVER - 1
        avoiding = [asyncio.create_task(router.acquire(1, 5.0, "v1", avoid={failed.url})) for _ in range(num_avoiding)]
        assert await router.acquire(1, 1.0, "v1") is failed
        assert not any(task.done() for task in avoiding)
        router.fail(NoInstanceLeft("all gone"))
        results = await asyncio.gather(*avoiding, return_exceptions=True)
        assert all(isinstance(result, NoInstanceLeft) for result in results) and not router.is_waited_for

    run(scenario())


def test_the_one_that_is_likely_done_first_takes_it() -> None:
    async def scenario() -> None:
        slow, fast, unseen = ready_member("slow", speed=10.0), ready_member("fast", speed=100.0), ready_member("unseen")
        slow.outstanding_tokens, fast.outstanding_tokens, unseen.outstanding_tokens = 20, 150, 100
        router = Router(lambda: [slow, fast, unseen])
        # In seconds: 2, 1.5, and 100 / 55 for the one that counts as usual.
        assert await router.acquire(100, 1.0, "v1") is fast
        assert await router.acquire(100, 1.0, "v1") is unseen

    run(scenario())


def test_a_later_turn_goes_where_the_earlier_one_was_unless_that_is_closed_full_or_far_more_loaded() -> None:
    """Generated pools; the rule once more, in words of its own."""

    async def scenario(rng: Random) -> str:
        members = [ready_member(f"m{i}", concurrency=2, speed=rng.choice((10.0, 20.0))) for i in range(3)]
        for member in members:
            member.outstanding_tokens = rng.randrange(1000)
        home = members[0]
        cached = Cached(home.url, rng.randrange(600))
        hindrance = rng.choice((None, None, None, "other version", "circuit", "full", "avoided", "gone"))
        if hindrance == "other version":
            members[0] = home = ready_member("m0", "v0")
        elif hindrance == "circuit":
            home.circuit.failed(1e12, 1e12, "reset")
        elif hindrance == "full":
            home.begin(GroupRequest([PartialRollout(0), PartialRollout(1)], 1))
        elif hindrance == "gone":
            members.remove(home)
        avoid = {home.url} if hindrance == "avoided" else set()
        loads = {m: m.outstanding_tokens / (m.speed or 1.0) for m in members}
        others = min((m for m in members if m is not home), key=loads.__getitem__)
        router = Router(lambda: members)
        taken = await router.acquire(10, 1.0, "v1", avoid=avoid, cached=cached)
        if hindrance is not None:
            assert taken is others
            return "hindered"
        least = min(loads.values())
        bears = loads[home] <= least * MUCH_MORE_LOADED + cached.num_tokens / (home.speed or 1.0)
        assert taken is (home if bears else others)
        return "kept" if taken is home else "left"

    outcomes = [asyncio.run(scenario(Random(seed))) for seed in range(400)]
    assert all(outcomes.count(each) > 50 for each in ("kept", "left", "hindered"))


@pytest.mark.parametrize("when", ["before it is assigned", "after"])
def test_one_that_is_called_off_gives_back_what_it_was_assigned_and_the_trial_too(when: str) -> None:
    async def scenario() -> None:
        member = ready_member("a", concurrency=1)
        member.circuit.failed(0.0, 0.0, "reset")  # long ago: one trial may go
        router = Router(lambda: [member])
        task = asyncio.create_task(router.acquire(10, 1.0, "v1", num_responses=3))
        await asyncio.sleep(0)
        if when == "after":
            router._assign()
            assert member.outstanding_tokens == 10 and not member.takes("v1")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert member.outstanding_tokens == 0 and member.takes("v1")
        assert await router.acquire(10, 1.0, "v1") is member, "the next one gets it"

    run(scenario())


def test_an_open_circuit_gets_nothing_and_then_a_single_trial() -> None:
    async def scenario() -> None:
        member = ready_member("a")
        member.circuit.failed(1e12, 1e12, "reset")  # far ahead of the clock
        router = Router(lambda: [member])
        tasks = [asyncio.create_task(router.acquire(1, 1.0, "v1")) for _ in range(3)]
        await rest()
        assert not any(task.done() for task in tasks)
        member.circuit.reset()
        member.circuit.failed(0.0, 0.0, "reset")
        router.wake()
        await rest()
        assert [task.done() for task in tasks] == [True, False, False]
        member.circuit.reset()
        router.wake()
        await asyncio.gather(*tasks)

    run(scenario())


def test_an_instance_that_passes_over_two_requests_gets_no_third() -> None:
    async def scenario() -> None:
        member = ready_member("a", concurrency=100)
        router = Router(lambda: [member])
        for is_free in (True, True, False):
            task = asyncio.create_task(router.acquire(1, 1.0, "v1"))
            await rest()
            assert task.done() == is_free
            if is_free:
                request = GroupRequest([PartialRollout(0)], 1)
                member.begin(request)
                # It has made tokens for others long after this one was sent.
                member.last_received_s = request.sent_s + 2 * QUEUE_S + 1.0
        task.cancel()

    run(scenario())


def test_a_failure_reaches_everybody_who_waits_and_nobody_who_comes_later() -> None:
    async def scenario() -> None:
        members: list[Member] = []
        router = Router(lambda: members)
        waiting = [asyncio.create_task(router.acquire(1, 1.0, "v1")) for _ in range(4)]
        await rest()
        waiting[0].cancel()
        router.fail(NoInstanceLeft("all gone"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, NoInstanceLeft) for result in results[1:])
        assert not router.is_waited_for
        later = asyncio.create_task(router.acquire(1, 1.0, "v1"))
        members.append(ready_member("a"))
        assert [await later] == members

    run(scenario())


def test_each_goes_to_the_one_that_will_have_done_it_first_of_those_that_may_have_it() -> None:
    """Random loads, speeds, requests and what they avoid, several at the same time, against the rule itself."""

    async def scenario(rng: Random) -> None:
        members = [
            ready_member(f"m{i}", concurrency=rng.choice((2, 7, 100)), speed=rng.choice((None, 1.0, 50.0)))
            for i in range(rng.randint(1, 6))
        ]
        usual = [member.speed for member in members if member.speed]
        unknown = sum(usual) / len(usual) if usual else 1.0
        loads = {member.url: member.outstanding_tokens for member in members}
        room = {member.url: member.client.max_concurrency or 0 for member in members}
        router = Router(lambda: members)

        async def ask(cost: int, avoid: set[str], cached: Cached | None) -> str:
            return (await router.acquire(cost, 1.0, "v1", avoid=avoid, cached=cached)).url

        def expected(cost: int, avoid: set[str], cached: Cached | None) -> str | None:
            may = [member for member in members if member.url not in avoid] or members
            free = [member for member in may if room[member.url]]
            if not free:
                return None
            speeds = {member.url: member.speed or unknown for member in free}
            best = min(free, key=lambda member: loads[member.url] / speeds[member.url]).url
            if cached is not None and cached.url in speeds:
                most_s = MUCH_MORE_LOADED * loads[best] / speeds[best] + cached.num_tokens / speeds[cached.url]
                if loads[cached.url] / speeds[cached.url] <= most_s:
                    best = cached.url
            loads[best] += cost
            room[best] -= 1
            return best

        names = [member.url for member in members]
        asked = [
            (
                rng.randint(1, MAX_COST),
                {name for name in names if rng.random() < 0.3},
                rng.choice((None, Cached(rng.choice(names), rng.randint(0, 200)))),
            )
            for _ in range(12)
        ]
        tasks = [asyncio.create_task(ask(*each)) for each in asked]
        await rest()
        for task, each in zip(tasks, asked, strict=True):
            assert (task.result() if task.done() else None) == expected(*each)
            task.cancel()

    for seed in range(100):
        run(scenario(Random(seed)))


def test_thousands_of_requests_at_a_thousand_instances_are_placed_in_no_time() -> None:
    async def scenario() -> None:
        members = [ready_member(f"m{i}", concurrency=8) for i in range(1000)]
        router = Router(lambda: members)

        async def ask(i: int) -> None:
            member = await router.acquire(100 + i % 7, float(i % 13), "v1", num_responses=4)
            request = GroupRequest([PartialRollout(j) for j in range(4)], 100)
            member.begin(request)
            await asyncio.sleep(0.1)
            member.end(request)
            router.release(member, 100 + i % 7)

        began_s, tasks = time.process_time(), []
        for i in range(4096):
            tasks.append(asyncio.create_task(ask(i)))
            if i % 8 == 0:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        # About half a second; a look at each instance for each request took 50.
        assert time.process_time() - began_s < 10.0

    run(scenario())
