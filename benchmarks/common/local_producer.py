"""A producer of given parts in the process of its caller, connected to as any other: for benchmarks and tests."""

import gc
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from async_rl.method.group_codec import pack
from async_rl.method.types import Batch, Prompt, WeightVersion
from async_rl.producer.batch_rollout import BatchRollout, BatchStarts
from async_rl.producer.client import RemoteRolloutSource, RemoteRun
from async_rl.producer.connection import Connection
from async_rl.producer.dock import Docking
from async_rl.producer.frames import Message
from async_rl.producer.process import ProducerAddress
from async_rl.producer.sample_queue import SampleQueue
from async_rl.producer.server import ProducerServer
from async_rl.rollouts.groups.group_maker import GroupMaker
from async_rl.rollouts.groups.idle_work import IdleWork
from async_rl.shared.event_loop import EventLoopThread
from async_rl.shared.net.listener import listen

LOST_AFTER_S = 30.0


class RolloutWithTexts(BatchRollout):
    pack = staticmethod(partial(pack, with_texts=True))


class LocalProducer:
    """Rolls out batches on `loop`; each has a connection of its own.

    Args:
        idle_work: gets the pool when the rollouts of a batch have finished.
        watch: called while a group is waited for; an exception that it raises ends the batch. May be replaced.
        on_figures: gets those of the rollouts of each batch, if there are any.
        docking: how groups reach several replicas.

    `with_texts`: groups have texts and rows, as they have not in a run.
    """

    with_texts = True

    def __init__(
        self,
        maker: GroupMaker,
        loop: EventLoopThread,
        idle_work: IdleWork | None = None,
        *,
        watch: Callable[[], None] = lambda: None,
        on_figures: Callable[[Mapping[str, Any]], None] = lambda figures: None,
        docking: Docking | None = None,
    ) -> None:
        self.maker = maker
        self.loop = loop
        self.idle_work = idle_work
        self.watch = watch
        self._on_figures = on_figures
        self._docking = docking or Docking()
        self._batches = BatchStarts()
        self._prompts: dict[str, Prompt] = {}
        loop.run(maker.start())
        # As the producer of a run.
        gc.freeze()
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
        self.loop.run_closing(self._server.stop())
        self.loop.run_closing(self.maker.close())

    def prompts_of(self, message: Message) -> list[dict[int, Prompt]]:
        """Of each mini-batch that a connection asks for."""
        return [{index: self._prompts[name] for index, name in part} for part in message["mini_batches"]]

    async def _start_batch(self, replica: int, message: Message) -> BatchRollout:
        return await self._batches.of(replica, message["start"], partial(self._begin, message))

    async def _begin(self, message: Message) -> BatchRollout:
        return (RolloutWithTexts if self.with_texts else BatchRollout)(
            self.maker,
            [Batch(message["start"], prompts, message["first_reserve"]) for prompts in self.prompts_of(message)],
            message["version"],
            self._docking,
            self.idle_work,
            on_figures=self._on_figures,
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
        super().__init__(RemoteRolloutSource(connection, watch), [batch], version, queue)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._connection.close()
