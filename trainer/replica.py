"""The loop's trainer on one rank: the Megatron trainer, and publishing from it to the inference pool."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from async_rl.loop import Window
from async_rl.publish import Publisher
from async_rl.training_order import TrainingOrder
from async_rl.types import Batch, Group, GroupProof, Publication, StepStats, WeightVersion
from async_rl.weight_stream import Stream
from trainer.parallel import Parallel
from trainer.trainer import MegatronTrainer

STREAM = "stream"
SCORE = "score"
PUBLISHED = "published"
"""What the main rank says to the others while it publishes: take part in a stream of the weights, once for each try; in
scoring the responses that follow; or go on with the publication that follows."""


class Replica:
    """The loop's `Trainer`: the Megatron trainer, and publishing from it to the inference pool."""

    def __init__(
        self,
        megatron: MegatronTrainer,
        parallel: Parallel,
        run_id: str,
        put_in_service: Callable[[WeightVersion, Collection[str]], None] | None,
        publisher: Publisher | None,
    ) -> None:
        """Args:
        run_id: the same on every rank, and unique, so that an instance left over from another run cannot pass for
            this one's.
        put_in_service: on leaders only: their pool's instances at these URLs serve a version.
        publisher: on the main rank only, in whose pool it does that itself.
        """
        self._megatron = megatron
        self._parallel = parallel
        self._run_id = run_id
        self._put_in_service = put_in_service
        self._publisher = publisher
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
            return self._publish(self._publisher, version)
        publication = self._help_to_publish()
        if self._put_in_service is not None:
            self._put_in_service(version, publication.instances)
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
        """The main rank's side: it tells the others what to take part in."""

        def make_stream() -> Stream:
            self._parallel.broadcast_json([STREAM])
            return self._megatron.export.stream()

        def score(prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[float]]:
            self._parallel.broadcast_json([SCORE, prompt, responses])
            return self._megatron.score(prompt, responses)

        publication = publisher.publish(version, self._megatron.export.specs, make_stream, score)
        self._parallel.broadcast_json([PUBLISHED, asdict(publication)])
        return publication

    def _help_to_publish(self) -> Publication:
        """The other ranks' side; a main rank that fails takes them with it, as it ends its connections."""
        while True:
            match self._parallel.broadcast_json(None):
                case [message] if message == STREAM:
                    self._megatron.export.serve()
                case [message, prompt, responses] if message == SCORE:
                    self._megatron.score(prompt, responses)
                case [_, publication]:
                    return Publication(**publication | {"instances": tuple(publication["instances"])})


class NoRollouts:
    """The rollouts of a rank that is not its replica's leader: it gets its groups from there."""

    @contextmanager
    def start(self, batch: Batch, version: WeightVersion) -> Iterator["NoRollouts"]:
        yield self

    def ready(self, wait: bool) -> list[Group]:
        raise AssertionError("only a leader reads the order of training")
