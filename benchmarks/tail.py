"""What the scheduling of a batch saves at its end, when the trainer waits for the longest responses.

    python -m benchmarks.tail --json

The pool itself (`InferencePool` with its router, credit, moves and split tails, and `ExpectedLength`) runs on a clock
that jumps (`benchmarks/common/virtual_time.py`), with engines that take time and compute nothing. An engine decodes up
to `SLOTS` responses at once, a token of each per step; a step with b of them takes 1 + b / 64 times `STEP_S`, and
computes a prompt for every request that begins in it. Response lengths are log-normal, cut at eight times their mean;
the prompt's own factor has half of the variance, and stays the same from epoch to epoch. Expected lengths are learned
from two epochs before the one that is measured. One trainer takes finished groups in order of completion; it needs as
long for the batch as all engines, full, need for its tokens.

One line for each number of instances, sigma and policy, means over draws:

- `iteration`: from the start of the batch to the end of its training, relative to the lower bound;
- `first`: share of the iteration until the first group;
- `tail`: share of it in which the trainer waits for one of the last eighth of the groups;
- `wait`: share in which it waits for any group but the first;
- `half`: `iteration` with a trainer of twice the speed.

The lower bound knows the lengths: generation of all tokens by full engines and training of the smallest group; the
longest response, alone in its engine, and training of its group; the group that can be first, and training of all. The
oracle knows them too: the fastest, for each draw, of several orders through the same pool, by response or by group.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast

from async_rl.config.pool_section import PoolSection
from async_rl.instance.client import InstanceClient
from async_rl.instance.partial_rollout import PartialRollout
from async_rl.pool.inference_pool import InferencePool
from async_rl.protocol.inference import SamplingParams
from async_rl.rollout.expected_length import ExpectedLength
from async_rl.token_arrays import TokenIds
from async_rl.types import WeightSpan
from benchmarks.common import virtual_time

VERSION = "v1"
STEP_S = 0.02
SLOTS = 32
"""Responses that an engine decodes at once."""

SLOTS_OF_TWICE = 64
"""A step with so many responses takes twice as long as one without."""

PROMPT = (1,) * 256
PREFILL_S = 1e-4
"""Of one token that an engine computes before it decodes."""

NUM_PROMPTS = 64
NUM_RESPONSES = 8
MEAN_TOKENS = 512
MAX_TOKENS = 8 * MEAN_TOKENS
NUM_EPOCHS = 2
"""From which lengths are learned."""
PROGRESS_STEPS = 32
"""Tokens of a response that arrive at once."""

Order = Literal[
    "batch", "learned", "longest response", "longest group", "shortest group", "latest start", "learned start"
]


@dataclass(frozen=True, slots=True)
class Policy:
    """Which mechanisms of the pool are on, and what is known of the lengths."""

    order: Order = "batch"
    by_response: bool = False
    """Whether a group is sent as requests for one response each."""
    credit: bool = False
    moves: bool = False
    tells: bool = True
    """Whether an engine reports how many responses it decodes at once, where there is credit."""


FIRST_COME = Policy()
DEFAULT = Policy(order="learned", credit=True, moves=True)
POLICIES: Mapping[str, Policy] = {
    "first come": FIRST_COME,
    "longest first alone": replace(FIRST_COME, order="learned"),
    "credit alone": replace(FIRST_COME, credit=True),
    "moves alone": replace(FIRST_COME, moves=True),
    "default": DEFAULT,
    "default without longest first": replace(DEFAULT, order="batch"),
    "default without credit": replace(DEFAULT, credit=False),
    "default without moves": replace(DEFAULT, moves=False),
    "default, concurrency not reported": replace(DEFAULT, tells=False),
    "the same without moves": replace(DEFAULT, tells=False, moves=False),
}
ORACLES: Sequence[Policy] = (
    *(replace(DEFAULT, order=order) for order in ("batch", "longest group", "shortest group")),
    *(Policy(order=order, by_response=True, credit=True) for order in ("longest response", "latest start")),
)

Lengths = Sequence[Sequence[int]]
"""Of the responses of each group."""


def step_s(num_responses: int) -> float:
    return STEP_S * (1 + num_responses / SLOTS_OF_TWICE)


@dataclass(eq=False, slots=True)
class _Job:
    """One request at an engine."""

    partials: Sequence[PartialRollout]
    on_progress: Any
    group: str
    prompt_tokens: int
    done: asyncio.Future[None]
    num_tokens: int = 0


class Engine:
    """What the pool calls of an `InstanceClient`: decodes in steps of the clock, first come, first served.

    Response `seed` has `lengths[seed]` tokens.
    """

    def __init__(
        self, url: str, lengths: Mapping[int, int], *, told: int | None, shows_queue: bool, slowness: float = 1.0
    ) -> None:
        self.url = url
        self._slowness = slowness
        self.streams = True
        self.has_streamed = shows_queue
        """The pool moves queued requests only where it sees that they are."""
        self.max_concurrency = told
        self._lengths = lengths
        self._queue: deque[tuple[_Job, PartialRollout]] = deque()
        self._running: list[tuple[_Job, PartialRollout]] = []
        self._computed: set[str] = set()
        """Groups whose prompt it has."""
        self._arrived: asyncio.Future[None] | None = None
        """Set while it waits; resolved when a request finds a free slot."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str,
        version: str,
        partials: Sequence[PartialRollout],
        *,
        on_progress: Any,
        **_: Any,
    ) -> None:
        done = asyncio.get_running_loop().create_future()
        job = _Job(partials, on_progress, request_id.split("-")[0], len(prompt_token_ids), done)
        self._queue.extend((job, partial) for partial in partials)
        if len(self._running) < SLOTS and self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        try:
            await job.done
        finally:
            self._queue = deque(each for each in self._queue if each[0] is not job)
            self._running = [each for each in self._running if each[0] is not job]

    async def work(self) -> None:
        """Decodes until it is cancelled."""
        while True:
            prompts_s = self._admit()
            if not self._running:
                await self._wait(None)
                # All that are sent at the same time are there before the first step.
                await asyncio.sleep(0)
                continue
            if prompts_s > 0:
                await asyncio.sleep(prompts_s)
            most = 1 if prompts_s else PROGRESS_STEPS
            num_steps = min(most, *(self._left(partial) for _, partial in self._running))
            self._advance(await self._pass(num_steps, self._slowness * step_s(len(self._running))))

    def _admit(self) -> float:
        """Fills free slots; returns the seconds for the prompts of requests that begin."""
        tokens = 0
        while self._queue and len(self._running) < SLOTS:
            job, partial = self._queue.popleft()
            tokens += len(partial.token_ids)
            if job.group not in self._computed:
                self._computed.add(job.group)
                tokens += job.prompt_tokens
            self._running.append((job, partial))
        return tokens * PREFILL_S

    async def _pass(self, num_steps: int, duration_s: float) -> int:
        """Lets steps pass, fewer if a request arrives that finds a free slot; returns their number."""
        passed_s = await self._wait(num_steps * duration_s)
        num_done = min(num_steps, max(1, math.ceil(passed_s / duration_s - 1e-6)))
        if (rest_s := num_done * duration_s - passed_s) > 1e-9:
            await asyncio.sleep(rest_s)
        return num_done

    async def _wait(self, at_most_s: float | None) -> float:
        """Waits for a request that finds a free slot, and returns after how long."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        self._arrived = arrived = loop.create_future()
        timer = None if at_most_s is None else loop.call_later(at_most_s, _resolve, arrived)
        await arrived
        if timer is not None:
            timer.cancel()
        return loop.time() - begun_s

    def _left(self, partial: PartialRollout) -> int:
        return self._lengths[partial.seed] - len(partial.token_ids)

    def _advance(self, num_steps: int) -> None:
        tokens = array(TokenIds.typecode, bytes(4 * num_steps))
        jobs: dict[_Job, None] = {}
        for job, partial in self._running:
            partial.token_ids.extend(tokens)
            partial.spans = [WeightSpan(VERSION, 0, len(partial.token_ids))]
            job.num_tokens += num_steps
            jobs[job] = None
            if self._left(partial) == 0:
                partial.finish_reason, partial.instance = "stop", self.url
        self._running = [each for each in self._running if each[1].finish_reason is None]
        for job in jobs:
            num_ended = sum(partial.finish_reason is not None for partial in job.partials)
            job.on_progress(job.num_tokens, num_ended)
            if num_ended == len(job.partials) and not job.done.done():
                job.done.set_result(None)

    # What a publish asks

    async def learn_dialect(self, timeout_s: float) -> None:
        pass

    async def max_model_len(self, timeout_s: float) -> int:
        return len(PROMPT) + MAX_TOKENS

    async def holding(self, timeout_s: float) -> "Holding":
        return Holding()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True, slots=True)
class Holding:
    version: str = VERSION
    boot_id: str | None = "boot"


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts whose responses have lengths of their own, drawn anew in each epoch; sigma 0: all of the mean."""

    sigma: float
    seed: int
    num_prompts: int = NUM_PROMPTS
    num_responses: int = NUM_RESPONSES
    slowness: float = 1.0
    """How many times slower than the others the first engine decodes them."""

    def lengths(self, epoch: int) -> Lengths:
        of_prompts, of_responses = random.Random(f"{self.seed}"), random.Random(f"{self.seed}-{epoch}")
        part = self.sigma / math.sqrt(2)
        median = MEAN_TOKENS * math.exp(-(self.sigma**2) / 2)
        found = []
        for _ in range(self.num_prompts):
            own = median * math.exp(of_prompts.gauss(0.0, part))
            drawn = (own * math.exp(of_responses.gauss(0.0, part)) for _ in range(self.num_responses))
            found.append([min(MAX_TOKENS, max(1, round(length))) for length in drawn])
        return found


@dataclass(slots=True)
class Batch:
    """The batch of one epoch, sent to `pool`."""

    pool: InferencePool
    policy: Policy
    expected: ExpectedLength
    lengths: Lengths
    ordered: list[list[float]] = field(init=False)
    finished_s: dict[int, float] = field(default_factory=dict)

    async def run(self) -> None:
        self.ordered = self._ordered()
        begun_s = asyncio.get_running_loop().time()

        async def generate(index: int) -> None:
            await self._generate(index)
            self.finished_s[index] = asyncio.get_running_loop().time() - begun_s

        async with asyncio.TaskGroup() as group:
            for index in range(len(self.lengths)):
                group.create_task(generate(index))

    async def _generate(self, index: int) -> None:
        own = self.lengths[index]
        n = 1 if self.policy.by_response else len(own)
        async with asyncio.TaskGroup() as group:
            for j in range(0, len(own), n):
                sampling = SamplingParams(n=n, max_tokens=MAX_TOKENS, seed=index * len(own) + j)
                request = self.pool.generate_group(PROMPT, sampling, f"{index}-{j}", VERSION, self.ordered[index][j])
                group.create_task(request)

    def _ordered(self) -> list[list[float]]:
        """What is expected of each response; those of larger numbers go first."""
        lengths, order = self.lengths, self.policy.order
        if order == "batch":
            return [[float(MEAN_TOKENS)] * len(own) for own in lengths]
        if order == "learned":
            return [[self.expected.of(str(index))] * len(own) for index, own in enumerate(lengths)]
        if order == "longest response":
            return [list(map(float, own)) for own in lengths]
        if order == "longest group":
            return [[float(max(own))] * len(own) for own in lengths]
        if order == "shortest group":
            return [[float(MAX_TOKENS - max(own))] * len(own) for own in lengths]
        return self._by_latest_start()

    def _by_latest_start(self) -> list[list[float]]:
        """For training from the shortest group to the longest: who has to start first to be there in time."""
        token_s = token_share_s(len(self.pool.members))
        due_s = 0.0
        starts_s: dict[tuple[int, int], float] = {}
        for i in sorted(range(len(self.lengths)), key=lambda i: max(self.lengths[i])):
            for j, length in enumerate(self.lengths[i]):
                starts_s[i, j] = due_s - step_s(SLOTS) * length
            due_s += token_s * sum(self.lengths[i])
        places = {each: place for place, each in enumerate(sorted(starts_s, key=starts_s.__getitem__, reverse=True))}
        # Only the order counts: rounded to tokens, all are the mean.
        return [
            [MEAN_TOKENS + 0.4 * places[i, j] / len(places) for j in range(len(own))]
            for i, own in enumerate(self.lengths)
        ]


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one iteration, and parts of them in which the trainer waited."""

    iteration_s: float
    bound_s: float
    first_s: float
    wait_s: float
    tail_s: float

    def figures(self) -> dict[str, float]:
        whole_s = self.iteration_s
        return {
            "iteration": whole_s / self.bound_s,
            "first": self.first_s / whole_s,
            "tail": self.tail_s / whole_s,
            "wait": self.wait_s / whole_s,
        }


def token_share_s(num_instances: int) -> float:
    """Seconds per token of all engines together, when they are full."""
    return step_s(SLOTS) / (SLOTS * num_instances)


def trained(lengths: Lengths, finished_s: Mapping[int, float], token_s: float, num_instances: int) -> Iteration:
    """Trains the groups in order of completion, at `token_s` for a token."""
    first_s = min(finished_s.values())
    now_s, wait_s, tail_s = first_s, 0.0, 0.0
    for place, index in enumerate(sorted(finished_s, key=finished_s.__getitem__)):
        gap_s = max(0.0, finished_s[index] - now_s)
        wait_s += gap_s
        tail_s += gap_s if place >= len(lengths) - len(lengths) // 8 else 0.0
        now_s += gap_s + token_s * sum(lengths[index])
    return Iteration(now_s, bound_s(lengths, token_s, num_instances), first_s, wait_s, tail_s)


def bound_s(lengths: Lengths, token_s: float, num_instances: int) -> float:
    """What no schedule can be faster than."""
    sums = [sum(own) for own in lengths]
    prompt_s = PREFILL_S * len(PROMPT)
    alone_s = [prompt_s + step_s(1) * max(own) for own in lengths]
    return max(
        token_share_s(num_instances) * sum(sums) + prompt_s * len(lengths) / num_instances + token_s * min(sums),
        max(alone + token_s * own for alone, own in zip(alone_s, sums, strict=True)),
        min(alone_s) + token_s * sum(sums),
    )


@dataclass(frozen=True, slots=True)
class Epoch:
    """When the groups of a batch were finished."""

    lengths: Lengths
    finished_s: Mapping[int, float]
    num_instances: int

    def trained(self, training: float = 1.0) -> Iteration:
        """With `training` as long as generation by full engines."""
        token_s = training * token_share_s(self.num_instances)
        return trained(self.lengths, self.finished_s, token_s, self.num_instances)


async def _epoch(policy: Policy, num_instances: int, prompts: Prompts) -> Epoch:
    urls = tuple(f"http://engine-{i}:1" for i in range(num_instances))
    config = PoolSection(instances=urls)
    pool = InferencePool(config)
    lengths: dict[int, int] = {}
    # Without credit, an instance that claims to decode everything at once gets everything.
    told = (SLOTS if policy.tells else None) if policy.credit else 10**6
    slowness = [prompts.slowness] + [1.0] * (num_instances - 1)
    engines = [
        Engine(url, lengths, told=told, shows_queue=policy.moves, slowness=own)
        for url, own in zip(urls, slowness, strict=True)
    ]
    for member, engine in zip(pool.members, engines, strict=True):
        member.client = cast(InstanceClient, engine)
    await pool.begin_publish()
    await pool.end_publish(VERSION, urls)
    working = [asyncio.create_task(engine.work()) for engine in engines]
    expected = ExpectedLength(MAX_TOKENS)
    for epoch in range(NUM_EPOCHS):
        for index, own in enumerate(prompts.lengths(epoch)):
            expected.note(str(index), own)
    drawn = prompts.lengths(NUM_EPOCHS)
    lengths.update(enumerate(length for own in drawn for length in own))
    batch = Batch(pool, policy, expected, drawn)
    await batch.run()
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)
    await pool.close()
    return Epoch(drawn, batch.finished_s, num_instances)


@cache
def _measured(policy: Policy, num_instances: int, prompts: Prompts) -> Epoch:
    return virtual_time.run(_epoch(policy, num_instances, prompts))


def measure(policy: Policy, num_instances: int, prompts: Prompts) -> Epoch:
    """The batch of the epoch after `NUM_EPOCHS` others."""
    if num_instances == 1:
        # There is no other instance to move to.
        policy = replace(policy, moves=False)
    return _measured(policy, num_instances, prompts)


def oracle(num_instances: int, prompts: Prompts, training: float = 1.0) -> Iteration:
    """The fastest of `ORACLES`."""
    found = (measure(policy, num_instances, prompts).trained(training) for policy in ORACLES)
    return min(found, key=lambda each: each.iteration_s)


def means(runs: Sequence[Iteration], of_half: Sequence[Iteration]) -> dict[str, float]:
    """Over draws, as in the module's docstring."""
    figures = [run.figures() for run in runs]
    found = {name: statistics.fmean(each[name] for each in figures) for name in figures[0]}
    found["half"] = statistics.fmean(run.figures()["iteration"] for run in of_half)
    return found


def rows(num_instances: int, draws: Sequence[Prompts]) -> Iterator[tuple[str, dict[str, float]]]:
    """The figures of the oracle and of each policy."""
    yield "oracle", means(*([oracle(num_instances, each, training) for each in draws] for training in (1.0, 0.5)))
    for name, policy in POLICIES.items():
        epochs = [measure(policy, num_instances, prompts) for prompts in draws]
        yield name, means(*([epoch.trained(training) for epoch in epochs] for training in (1.0, 0.5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines only")
    parser.add_argument("--draws", type=int, default=10, help="of the lengths (default: %(default)s)")
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2, 4], help="(default: %(default)s)")
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 1.5], help="(default: %(default)s)")
    parser.add_argument("--slowness", type=float, default=1.0, help="of the first engine (default: %(default)s)")
    options = parser.parse_args()
    for num_instances in options.instances:
        for sigma in options.sigma:
            draws = [Prompts(sigma, seed, slowness=options.slowness) for seed in range(options.draws)]
            for name, figures in rows(num_instances, draws):
                shown = {key: round(value, 3) for key, value in figures.items()}
                print(json.dumps({"instances": num_instances, "sigma": sigma, "policy": name, **shown}), flush=True)


if __name__ == "__main__":
    main()
