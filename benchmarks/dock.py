"""What the slowest replica costs at the step: groups by the dock, and shares that are dealt by index.

    python -m benchmarks.dock --json [--batches N]

Real sockets and processes: a producer (`ProducerServer`, `BatchRollout`, the dock), and replicas that take groups as a
trainer's leader does (`RemoteRolloutSource`, `TrainingOrder`, `pack_windows`) and meet in a collective of gloo at each
step. Rollouts and training take time and compute nothing, so that two cores carry five processes: a group finishes when
its longest response does, at `TOKENS_PER_S` a response; a replica trains a micro-batch in proportion to its tokens, and
all of them together, none slowed, would need as long as the longest rollout. Lengths are log-normal with the given
sigma, cut at eight times their median. Both ways see the same groups in turn, in the same processes.

One line per number of replicas, sigma and slowness of the first replica: the share of an iteration that a replica waits
at the step for the last one, on average, and the length of the iteration relative to fixed shares.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch.distributed as dist

from async_rl.config.train_section import TrainSection
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Prompt, Response, WeightSpan
from async_rl.producer.batch_rollout import BatchRollout, BatchStarts
from async_rl.producer.client import RemoteRolloutSource
from async_rl.producer.cutting import num_tokens
from async_rl.producer.dock import Docking
from async_rl.producer.frames import Message
from async_rl.producer.process import ProducerAddress
from async_rl.producer.server import ProducerServer
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.net.listener import listen
from trainer.batching.packing import pack_windows

VERSION = "v1"
PROMPTS_PER_REPLICA = 32
RESPONSES = 8
MEDIAN_TOKENS = 100
MAX_TOKENS = 8 * MEDIAN_TOKENS
PROMPT_TOKENS = 64
TOKENS_PER_S = 400.0
"""Of one response: the longest takes two seconds."""

MICRO_BATCH = 4096
LOST_AFTER_S = 60.0


@dataclass(frozen=True)
class Case:
    num_replicas: int
    sigma: float
    slowed: float
    """The first replica's speed, relative to that of the others."""


class DrawnRollouts:
    """In place of a `GroupMaker`: groups of drawn lengths that finish in time."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def drawn(self, iteration: int, index: int, prompt: Prompt) -> Group:
        rng = random.Random(f"{self._case} {iteration} {index}")
        lengths = [
            max(1, min(MAX_TOKENS, round(MEDIAN_TOKENS * rng.lognormvariate(0, self._case.sigma)))) for _ in range(8)
        ]
        responses = tuple(
            Response(
                token_ids=TokenIds([1] * length),
                logprobs=Logprobs([0.0] * length),
                text="",
                finish_reason="stop",
                weight_spans=(WeightSpan(VERSION, 0, length),),
                instance="http://none",
            )
            for length in lengths
        )
        return Group(
            iteration=iteration,
            index=index,
            prompt=prompt,
            responses=responses,
            rewards=(0.0,) * RESPONSES,
            weight_version=VERSION,
            started_s=0.0,
            finished_s=0.0,
        )

    async def group(self, iteration: int, index: int, prompt: Prompt, version: str) -> Group:
        group = self.drawn(iteration, index, prompt)
        await asyncio.sleep(longest(group) / TOKENS_PER_S)
        return group


def longest(group: Group) -> int:
    return max(len(response.token_ids) for response in group.responses)


def make_batch(case: Case, iteration: int) -> Batch:
    prompt = Prompt("p", TokenIds([1] * PROMPT_TOKENS), {})
    size = PROMPTS_PER_REPLICA * case.num_replicas
    return Batch(iteration, {index: replace(prompt, prompt_id=f"p{index}") for index in range(size)})


class Producer:
    """Iteration 2 k is batch k by the dock, 2 k + 1 the same batch with fixed shares."""

    def __init__(self, case: Case, loop: EventLoopThread) -> None:
        self._rollouts = DrawnRollouts(case)
        self._case = case
        self._docking = Docking(case.num_replicas, max_ahead=MICRO_BATCH)
        self._batches = BatchStarts()
        secret, listener = secrets.token_hex(), listen("the producer", "127.0.0.1", 0, None)
        self.server = ProducerServer(secret, self._of_replica)
        loop.run(self.server.start(listener))
        self.address = ProducerAddress("127.0.0.1", listener.getsockname()[1], secret)

    async def _of_replica(self, replica: int, message: Message) -> BatchRollout:
        iteration = message["start"]

        async def start() -> BatchRollout:
            # The same draws for both.
            batch = replace(make_batch(self._case, iteration // 2), iteration=iteration)
            docking = replace(self._docking, by_index=bool(iteration % 2))
            rollouts: Any = _OfBatch(self._rollouts, iteration // 2)
            return BatchRollout(rollouts, [batch], VERSION, docking)

        return await self._batches.of(replica, iteration, start)


class _OfBatch:
    def __init__(self, rollouts: DrawnRollouts, batch: int) -> None:
        self._rollouts = rollouts
        self._batch = batch

    def take_figures(self) -> dict[str, Any]:
        return {}

    async def group(self, iteration: int, index: int, prompt: Prompt, version: str) -> Group:
        return replace(await self._rollouts.group(self._batch, index, prompt, version), iteration=iteration)


def replica_process(
    case: Case, replica: int, address: ProducerAddress, store_port: int, num_batches: int, found: "SimpleQueue[Any]"
) -> None:
    """Trains `num_batches` both ways; puts what it waited at each step and what it trained."""
    store = dist.TCPStore("127.0.0.1", store_port, case.num_replicas, is_master=replica == 0, timeout=timedelta(0, 60))
    dist.init_process_group("gloo", store=store, rank=replica, world_size=case.num_replicas)
    connection = address.connect(LOST_AFTER_S, replica=replica)
    rollouts = DrawnRollouts(case)
    for iteration in range(2 * num_batches):
        by_index = bool(iteration % 2)
        batch = make_batch(case, iteration // 2)
        groups = [rollouts.drawn(iteration // 2, index, prompt) for index, prompt in batch.prompts.items()]
        seconds = max(map(longest, groups)) / TOKENS_PER_S
        speed = sum(map(num_tokens, groups)) / case.num_replicas / seconds * (case.slowed if replica == 0 else 1.0)
        config = TrainSection(iterations=1)
        source = RemoteRolloutSource(connection, lambda: None, replica, case.num_replicas, by_index=by_index)
        dist.barrier()
        began_s = time.monotonic()
        mine: list[int] = []
        with source.start([replace(batch, iteration=iteration)], VERSION) as run:
            order = TrainingOrder(run, config, [batch], replica, case.num_replicas)
            order.begin_mini_batch()
            for window in pack_windows(order, MICRO_BATCH, whole_backlog=False):
                micro_batch = [group for each in window for group in each]
                mine += [group.index for group in micro_batch]
                time.sleep(sum(map(num_tokens, micro_batch)) / speed)
            trained_s = time.monotonic()
            dist.barrier()
            ended_s = time.monotonic()
        found.put((replica, iteration, (ended_s - trained_s) / (ended_s - began_s), ended_s - began_s, mine))
    connection.close()


def measure(case: Case, num_batches: int) -> dict[str, Any]:
    loop = EventLoopThread()
    producer = Producer(case, loop)
    context = multiprocessing.get_context("spawn")
    found: SimpleQueue[Any] = context.SimpleQueue()
    free = listen("the store", "127.0.0.1", 0, None)
    port = free.getsockname()[1]
    free.close()
    arguments = [(case, replica, producer.address, port, num_batches, found) for replica in range(case.num_replicas)]
    processes = [context.Process(target=replica_process, args=each) for each in arguments]
    for process in processes:
        process.start()
    results = [found.get() for _ in range(2 * num_batches * case.num_replicas)]
    for process in processes:
        process.join()
    loop.run(producer.server.stop())
    loop.close()
    return _summary(case, results, num_batches)


def _summary(
    case: Case, results: Sequence[tuple[int, int, float, float, list[int]]], num_batches: int
) -> dict[str, Any]:
    size = PROMPTS_PER_REPLICA * case.num_replicas
    lost: dict[bool, list[float]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for iteration in range(2 * num_batches):
        own = [each for each in results if each[1] == iteration]
        assert sorted(index for each in own for index in each[4]) == list(range(size)), "each group is trained once"
        lost[bool(iteration % 2)].append(statistics.fmean(each[2] for each in own))
        seconds[bool(iteration % 2)].append(max(each[3] for each in own))
    return {
        "replicas": case.num_replicas,
        "sigma": case.sigma,
        "slowed": case.slowed,
        "lost": round(statistics.fmean(lost[False]), 4),
        "lost_with_fixed_shares": round(statistics.fmean(lost[True]), 4),
        "iteration": round(statistics.fmean(a / b for a, b in zip(*seconds.values(), strict=True)), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--batches", type=int, default=8, help="of each case")
    options = parser.parse_args(arguments)
    for num_replicas in (2, 4):
        for sigma in (1.0, 1.5):
            for slowed in (1.0, 0.5):
                result = measure(Case(num_replicas, sigma, slowed), options.batches)
                print(json.dumps(result) if options.json else result, flush=True)


if __name__ == "__main__":
    main()
