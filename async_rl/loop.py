"""Algorithm 1 of Periodic Asynchrony (arXiv 2511.18871) and nothing else.

`Trainer` is implemented on Megatron by `trainer`, `PromptBatches` by `async_rl.data.prompts` and `Rollouts` by
`async_rl.rollout.producer`. Every training rank runs this same loop; the leader of each data-parallel replica makes the
rollouts of the replica's share of each batch, and the replica's other ranks get the groups from it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from async_rl.config.sections import TrainSection
from async_rl.ledger import Ledger
from async_rl.tracking.recorder import Recorder
from async_rl.training_order import FinishedGroups, TrainingOrder
from async_rl.types import Batch, Group, GroupProof, Publication, StepStats, WeightVersion

Window = Sequence[Sequence[Group]]
"""Micro-batches that are trained in one go, each made of whole groups."""


class Trainer(Protocol):
    """The policy in training, or one rank's part of it."""

    @property
    def dp_rank(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def publish_weights(self) -> Publication:
        """Gives every instance exactly the current weights or puts it out of service; the same answer on all ranks."""
        ...

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        """A mini-batch's groups, packed for training as they come; the same windows on all ranks of a replica."""
        ...

    def accumulate(self, window: Window) -> list[GroupProof]:
        """Adds the window's gradient, as a sum; answers with the ledger rows of its groups, on one rank per replica."""
        ...

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """The rows of all ranks; waits for each of them to finish its share."""
        ...

    def optimizer_step(self) -> StepStats:
        """Divides the summed gradients by the count of all that was accumulated, once; clips; steps.

        A gradient that is not finite is no step: its stats say so, or the run ends (`train.on_nonfinite`).
        """
        ...


class PromptBatches(Protocol):
    def batch(self, iteration: int) -> Batch:
        """The prompts of an iteration: a pure function of seed and iteration."""
        ...


class Rollouts(Protocol):
    def start(self, batch: Batch, version: WeightVersion) -> AbstractContextManager[FinishedGroups]:
        """Dispatches the whole batch and returns at once; the groups come in order of completion."""
        ...


def train(
    config: TrainSection,
    trainer: Trainer,
    prompts: PromptBatches,
    producer: Rollouts,
    ledger: Ledger,
    recorder: Recorder,
    first_iteration: int = 0,
    after_iteration: Callable[[int], None] = lambda iteration: None,
) -> None:
    """Runs all iterations from `first_iteration` on; an error in any part ends the run before the step it would spoil.

    Args:
        after_iteration: called with each iteration that is complete and recorded; saves checkpoints.

    Raises:
        AsyncRLError: whatever the parts raise: publishing, rollouts, rewards or the on-policy proof.
    """
    for iteration in range(first_iteration, config.iterations):
        record = recorder.begin(iteration)
        with record.timed("publish_s"):
            publication = trainer.publish_weights()
        mini_batches = prompts.batch(iteration).split(config.steps_per_batch)
        shares = [mini_batch.share(trainer.dp_rank, trainer.num_replicas) for mini_batch in mini_batches]
        with producer.start(Batch.union(shares), publication.version) as finished:
            order = TrainingOrder(finished, config, shares)
            for mini_batch in mini_batches:
                order.begin_mini_batch()
                rows: list[GroupProof] = []
                with record.timed("period_s"):
                    for window in trainer.windows(order):
                        with record.training(window):
                            rows += trainer.accumulate(window)
                rows = trainer.gather(rows)
                recorder.write_groups(record, rows)
                ledger.require_on_policy(mini_batch, publication, rows)
                with record.timed("step_s"):
                    record.add_step(rows, trainer.optimizer_step())
        recorder.end(record, publication)
        after_iteration(iteration)
