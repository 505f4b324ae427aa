"""The loop's trainer on one rank: the Megatron trainer, and publishing from it to the inference pool."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from async_rl.loop import Window
from async_rl.pool import InferencePool
from async_rl.publish import Publisher
from async_rl.training_order import TrainingOrder
from async_rl.types import Batch, Group, GroupProof, Publication, StepStats, WeightVersion
from async_rl.weight_stream import TensorSpec
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

STREAM = "stream"
"""What the main rank says to the others when the weights are to be streamed, once for each try of a publish."""


class Replica:
    """The loop's `Trainer`: the Megatron trainer, and publishing from it to the inference pool."""

    def __init__(
        self,
        megatron: MegatronTrainer,
        parallel: Parallel,
        pool: InferencePool | None,
        publisher: Publisher | None,
    ) -> None:
        """`pool` is given on leaders only, `publisher` on the main rank only."""
        self._megatron = megatron
        self._parallel = parallel
        self._pool = pool
        self._publisher = publisher
        # Unique per run, so that an instance left over from another run cannot pass for this one's.
        self._run_id: str = parallel.broadcast_json(secrets.token_hex(4))
        self._num_publishes = 0

    @property
    def replica(self) -> int:
        return self._parallel.replica

    @property
    def num_replicas(self) -> int:
        return self._parallel.num_replicas

    def publish_weights(self) -> Publication:
        """Moves the weights to the pool and tells every rank which instances serve them; waits for the main rank.

        Raises:
            PublishError: no instance took the weights.
        """
        version = f"{self._run_id}-{self._num_publishes}"
        self._num_publishes += 1
        self._megatron.before_publish()
        if self._publisher is not None:
            publication = self._publish(self._publisher, version)
        else:
            publication = self._help_to_publish()
            if self._pool is not None:
                self._pool.set_version(version, publication.instances)
        return publication

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        return self._megatron.windows(order)

    def accumulate(self, window: Window) -> list[GroupProof]:
        return self._megatron.accumulate(window)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        return self._megatron.gather(rows)

    def optimizer_step(self) -> StepStats:
        return self._megatron.optimizer_step()

    def _publish(self, publisher: Publisher, version: WeightVersion) -> Publication:
        """The main rank's side: before every stream it tells the others to take part in one."""

        def make_stream() -> Iterator[tuple[TensorSpec, torch.Tensor]]:
            self._parallel.broadcast_json(STREAM)
            return self._megatron.export.stream()

        publication = publisher.publish(version, self._megatron.export.specs, make_stream)
        self._parallel.broadcast_json(asdict(publication))
        return publication

    def _help_to_publish(self) -> Publication:
        """The other ranks' side; a main rank that fails takes them with it, as it ends its connections."""
        while (answer := self._parallel.broadcast_json(None)) == STREAM:
            self._megatron.export.serve()
        return Publication(**answer | {"instances": tuple(answer["instances"])})


class NoRollouts:
    """The rollouts of a rank that is not its replica's leader: it gets its groups from there."""

    @contextmanager
    def start(self, batch: Batch, version: WeightVersion) -> Iterator["NoRollouts"]:
        yield self

    def ready(self, wait: bool) -> list[Group]:
        raise AssertionError("only a leader reads the order of training")
