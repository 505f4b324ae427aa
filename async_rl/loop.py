"""Algorithm 1 of Periodic Asynchrony (arXiv 2511.18871) and nothing else.

`Trainer` is implemented on Megatron by `trainer`, `PromptBatches` by `async_rl.prompts` and `Rollouts` by
`async_rl.producer`. Every data-parallel leader runs this same loop on its share of each batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from async_rl.config import TrainSection
from async_rl.ledger import Ledger
from async_rl.metrics import Recorder
from async_rl.types import Batch, Group, GroupProof, Publication, StepStats, WeightVersion


class Trainer(Protocol):
    """The policy in training: one replica of it in each data-parallel leader."""

    @property
    def replica(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    def publish_weights(self) -> Publication:
        """Gives every instance exactly the current weights or puts it out of service; the same answer on all ranks."""
        ...

    def accumulate(self, group: Group) -> GroupProof:
        """Adds one group's gradient, as a sum; answers with its ledger row."""
        ...

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """The rows of all replicas; waits for each of them to finish its share."""
        ...

    def optimizer_step(self) -> StepStats:
        """Divides the summed gradients by the whole batch's count, once; clips; steps."""
        ...


class PromptBatches(Protocol):
    def batch(self, iteration: int) -> Batch:
        """The prompts of an iteration: a pure function of seed and iteration."""
        ...


class Rollouts(Protocol):
    def start(self, batch: Batch, version: WeightVersion) -> AbstractContextManager[Iterable[Group]]:
        """Dispatches the whole batch and returns at once; the groups come in order of completion."""
        ...


def train(
    config: TrainSection,
    trainer: Trainer,
    prompts: PromptBatches,
    producer: Rollouts,
    ledger: Ledger,
    recorder: Recorder,
) -> None:
    """Runs all iterations; an error in any part ends the run before the step it would have spoiled.

    Raises:
        AsyncRLError: whatever the parts raise: publishing, rollouts, rewards or the on-policy proof.
    """
    for iteration in range(config.iterations):
        record = recorder.begin(iteration)
        with record.timed("publish_s"):
            publication = trainer.publish_weights()
        batch = prompts.batch(iteration)
        share = batch.share(trainer.replica, trainer.num_replicas)
        rows: list[GroupProof] = []
        with record.timed("period_s"), producer.start(share, publication.version) as finished:
            for group in training_order(finished, config, share):
                with record.training(group):
                    rows.append(trainer.accumulate(group))
        rows = trainer.gather(rows)
        ledger.require_on_policy(batch, publication, rows)
        with record.timed("step_s"):
            stats = trainer.optimizer_step()
        recorder.end(record, publication, rows, stats)


def training_order(finished: Iterable[Group], config: TrainSection, share: Batch) -> Iterator[Group]:
    """The groups in the order in which they are trained.

    `mode = "synchronous"` waits for all of them first, the baseline to compare with. `order = "prompt"` trains them by
    their place in the batch, holding back what finished early, so that sums are formed in the same order in every run.
    """
    if config.mode == "synchronous":
        finished = list(finished)
    if config.order == "completion":
        yield from finished
        return
    early: dict[int, Group] = {}
    due = iter(sorted(share.prompts))
    next_index = next(due, None)
    for group in finished:
        early[group.index] = group
        while next_index is not None and next_index in early:
            yield early.pop(next_index)
            next_index = next(due, None)
    # Whatever is left belongs to no place of the batch; the ledger will name it.
    yield from early.values()
