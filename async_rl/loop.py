"""Algorithm 1 of Periodic Asynchrony (arXiv 2511.18871) and nothing else.

`Trainer` is implemented on Megatron by `trainer`, `PromptBatches` by `async_rl.rollouts.data.prompts` and
`RolloutSource` by `async_rl.producer.client`. Every training rank runs this same loop; the leader of each data-parallel
replica gets groups of each batch from the producer, which gives each to one replica, or a long one in pieces to
several, and the replica's other ranks get them from it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from async_rl.config.train_section import TrainSection
from async_rl.errors import ProducerLost, WaitTimedOut, WriteFailed
from async_rl.method.group_proof import GroupProof, join_pieces
from async_rl.method.ledger import Ledger
from async_rl.method.selection.finished_groups import FinishedGroups
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Publication, WeightVersion
from async_rl.records.recorder import Recorder

Window = Sequence[Sequence[Group]]
"""Micro-batches that are trained together, each made of whole groups, or of pieces of long ones."""


class Trainer(Protocol):
    """The policy in training, or one rank's part of it."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def publish_weights(self) -> Publication:
        """Gives every instance exactly the current weights or puts it out of service; the same result on all ranks."""
        ...

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        """A mini-batch's groups, packed for training as they arrive; the same windows on all ranks of a replica."""
        ...

    def accumulate(self, window: Window) -> list[GroupProof]:
        """Adds the window's gradient, as a sum; returns the ledger rows of its groups, on one rank per replica."""
        ...

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """The rows of all ranks; waits until each rank has finished its groups."""
        ...

    def optimizer_step(self) -> StepStats:
        """Divides the summed gradients once, by the count accumulated in the batch; clips; steps.

        A gradient that is not finite causes no step: the stats report it.
        """
        ...


class PromptBatches(Protocol):
    def batch(self, iteration: int) -> Batch:
        """The prompts of an iteration: a pure function of seed and iteration."""
        ...


class RolloutSource(Protocol):
    def start(self, mini_batches: Sequence[Batch], version: WeightVersion) -> AbstractContextManager[FinishedGroups]:
        """Dispatches the whole batch and returns immediately; the groups arrive as they finish."""
        ...


def train(
    config: TrainSection,
    trainer: Trainer,
    prompts: PromptBatches,
    producer: RolloutSource,
    ledger: Ledger,
    recorder: Recorder,
    first_iteration: int = 0,
    after_iteration: Callable[[int], None] = lambda iteration: None,
) -> None:
    """Runs all iterations from `first_iteration` on; any error ends the run before the step that it would affect.

    Args:
        after_iteration: called after each iteration that is complete and recorded, or could not be; saves
            checkpoints.

    Raises:
        AsyncRLError: any error of the parts: publishing, rollouts, rewards or the on-policy proof.
    """
    for iteration in range(first_iteration, config.num_iterations):
        record = recorder.begin_iteration(iteration)
        with record.timed("publish_s"):
            publication = trainer.publish_weights()
        mini_batches = prompts.batch(iteration).split(config.steps_per_batch)
        rollouts = producer.start(mini_batches, publication.version)
        try:
            with record.timed_exit("evaluation_s", rollouts) as finished:
                order = TrainingOrder(finished, config, mini_batches, trainer.dp_rank, trainer.num_replicas)
                for mini_batch in mini_batches:
                    order.begin_mini_batch()
                    rows: list[GroupProof] = []
                    with record.timed("period_s"):
                        for window in trainer.windows(order):
                            with record.training(window):
                                rows += trainer.accumulate(window)
                    rows = join_pieces(trainer.gather([*rows, *order.left_out()]))
                    recorder.write_groups(record, rows)
                    ledger.require_on_policy(mini_batch, publication, rows, trainer.num_replicas)
                    with record.timed("step_s"):
                        record.add_step(rows, trainer.optimizer_step())
            recorder.end_iteration(record, publication)
        except (WriteFailed, ProducerLost, WaitTimedOut):
            if len(record.steps) == len(mini_batches):
                # The weights are those of a whole iteration all the same.
                recorder.keep_unwritten(record, publication)
                after_iteration(iteration)
            raise
        after_iteration(iteration)
