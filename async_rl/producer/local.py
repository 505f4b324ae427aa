"""A producer of given parts in the process of its caller, connected to as any other: for benchmarks and tests."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from async_rl.config.rollout_section import RolloutSection
from async_rl.data.prompts import Tokenizer
from async_rl.event_loop import EventLoopThread
from async_rl.net.listener import listen
from async_rl.pool.inference_pool import InferencePool
from async_rl.producer.client import RemoteRollouts, RemoteRun
from async_rl.producer.connection import Connection
from async_rl.producer.dock import Docking
from async_rl.producer.frames import Message
from async_rl.producer.process import ProducerAddress
from async_rl.producer.running_batch import BatchStarts, RunningBatch
from async_rl.producer.sample_queue import SampleQueue
from async_rl.producer.server import ProducerServer
from async_rl.rewards import Reward
from async_rl.rollout.idle_work import IdleWork
from async_rl.rollout.program_rollouts import ProgramRollouts
from async_rl.rollout.scored_rollouts import ScoredRollouts
from async_rl.types import Batch, Prompt, WeightVersion

LOST_AFTER_S = 30.0


class LocalProducer:
    """Rolls out batches on `loop`; each has a connection of its own.

    Args:
        idle_work: gets the pool when the rollouts of a batch have finished.
        watch: called while a group is waited for; an exception that it raises ends the batch. May be replaced.
        on_rollouts: gets the figures of the programs' rollouts of each batch.
        docking: how groups reach several replicas.

    `with_texts`: groups have texts and rows, as they have not in a run.
    """

    with_texts = True

    def __init__(
        self,
        pool: InferencePool,
        reward: Reward,
        loop: EventLoopThread,
        tokenizer: Tokenizer,
        rollout: RolloutSection,
        seed: int,
        idle_work: IdleWork | None = None,
        *,
        skip_special_tokens: bool = True,
        watch: Callable[[], None] = lambda: None,
        programs: ProgramRollouts | None = None,
        on_rollouts: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        docking: Docking | None = None,
    ) -> None:
        self.rollouts = ScoredRollouts(
            pool, reward, tokenizer, rollout, seed, skip_special_tokens=skip_special_tokens, programs=programs
        )
        self.loop = loop
        self.idle_work = idle_work
        self.watch = watch
        self._on_rollouts = on_rollouts
        self._docking = docking or Docking()
        self._batches = BatchStarts()
        self._prompts: dict[str, Prompt] = {}
        loop.run(self.rollouts.start())
        secret, listener = secrets.token_hex(), listen("the producer", "127.0.0.1", 0, None)
        self._server = ProducerServer(secret, self._start_batch)
        loop.run(self._server.start(listener))
        host, port = listener.getsockname()[:2]
        self.address = ProducerAddress(host, port, secret)

    def start(self, batch: Batch, version: WeightVersion) -> RemoteRun:
        """Has the whole batch dispatched to the instances that serve `version`; does not wait."""
        self._prompts.update({prompt.prompt_id: prompt for prompt in batch.prompts.values()})
        return start_alone(self.address, batch, version, lambda: self.watch())

    def close(self) -> None:
        """Ends what runs."""
        self.loop.end(self._server.stop())
        self.loop.end(self.rollouts.close())

    def prompts_of(self, message: Message) -> list[dict[int, Prompt]]:
        """Of each mini-batch that a connection asks for."""
        return [{index: self._prompts[name] for index, name in part} for part in message["mini_batches"]]

    async def _start_batch(self, replica: int, message: Message) -> RunningBatch:
        return await self._batches.of(replica, message["start"], partial(self._begin, message))

    async def _begin(self, message: Message) -> RunningBatch:
        iteration = message["start"]

        def note_finished() -> None:
            self.rollouts.note_finished(iteration, self._on_rollouts)

        return RunningBatch(
            self.rollouts,
            [Batch(iteration, prompts, message["first_reserve"]) for prompts in self.prompts_of(message)],
            message["version"],
            self._docking,
            self.idle_work,
            on_finished=note_finished,
            with_texts=self.with_texts,
        )


def start_alone(
    address: ProducerAddress, batch: Batch, version: WeightVersion, watch: Callable[[], None] = lambda: None
) -> RemoteRun:
    """Starts a batch on a connection of its own, which has all of its groups."""
    return _OwnConnection(address.connect(LOST_AFTER_S, replica=0), watch, batch, version)


class _OwnConnection(RemoteRun):
    """Closes the connection with the run."""

    def __init__(self, connection: Connection, watch: Callable[[], None], batch: Batch, version: WeightVersion) -> None:
        queue = SampleQueue([batch.prompts], version)
        super().__init__(RemoteRollouts(connection, watch), [batch], version, queue)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._connection.close()
