"""Trains recorded groups again, without instances: what the loop needs in place of a pool; for `__main__.py`."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from async_rl.config.sections import Config
from async_rl.loop import Window, train
from async_rl.method.group_proof import GroupProof
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Publication, WeightVersion
from async_rl.records.recorder import Recorder, RunRecorder
from trainer.parallel import Parallel
from trainer.session import make_ledger
from trainer.trainer import MegatronTrainer
from trainer.verify.recorded_groups import read_batch, read_share


class ArrivingAgain:
    """The groups that a replica trained, one by one, in the order in which they came, mini-batch after mini-batch."""

    def __init__(self, groups: Sequence[Group], mini_batches: Sequence[Batch]) -> None:
        self._groups = list(groups)
        self._mini_batches = [part.prompts.keys() for part in mini_batches]

    def ready(self, wait: bool) -> list[Group]:
        """The next group where one is waited for; so a window is formed of as many groups as it has room for."""
        if not wait:
            return []
        if self._groups and self._groups[0].index in self._mini_batches[0]:
            return [self._groups.pop(0)]
        self._mini_batches.pop(0)
        return []

    def begin(self, groups: Sequence[Group]) -> None:
        """Nothing depends on it here."""

    def cancel(self, indices: Collection[int]) -> None:
        self._groups = [group for group in self._groups if group.index not in indices]


class RecordedBatches:
    """The batches of a recording, and their groups: the loop's prompts and rollouts of one replica."""

    def __init__(self, directory: Path, parallel: Parallel, first_reserve: int | None) -> None:
        self._directory = directory
        self._parallel = parallel
        self._first_reserve = first_reserve

    def version(self, iteration: int) -> WeightVersion:
        """The version under which an iteration was recorded."""
        return read_share(self._directory, iteration, 0).version

    def batch(self, iteration: int) -> Batch:
        return read_batch(self._directory, iteration, self._first_reserve)

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: WeightVersion) -> Iterator[ArrivingAgain]:
        share = read_share(self._directory, mini_batches[0].iteration, self._parallel.dp_rank)
        yield ArrivingAgain(share.groups, mini_batches)


class ReplayingRank:
    """The loop's `Trainer` without a pool: a publish names the recorded version and sends nothing."""

    def __init__(self, megatron: MegatronTrainer, parallel: Parallel, batches: RecordedBatches) -> None:
        self._megatron = megatron
        self._parallel = parallel
        self._batches = batches
        self._iteration = 0

    @property
    def dp_rank(self) -> int:
        return self._parallel.dp_rank

    @property
    def num_replicas(self) -> int:
        return self._parallel.num_replicas

    def publish_weights(self) -> Publication:
        self._megatron.before_publish()
        version = self._batches.version(self._iteration)
        self._iteration += 1
        return Publication(version, fingerprint="", instances=(), num_bytes=0, seconds=0.0)

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        return self._megatron.windows(order)

    def accumulate(self, window: Window) -> list[GroupProof]:
        return self._megatron.accumulate(window)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        return self._megatron.gather(rows)

    def optimizer_step(self) -> StepStats:
        return self._megatron.optimizer_step()


def replay(config: Config, parallel: Parallel, directory: Path) -> None:
    """Trains what `directory` holds, from the model that the config names; writes records and model to `run.dir`."""
    if parallel.is_main:
        config.run.dir.mkdir(parents=True, exist_ok=True)
    megatron = MegatronTrainer.of(config, parallel)
    first_reserve = config.prompts.prompts_per_batch if config.prompts.reserve else None
    batches = RecordedBatches(directory, parallel, first_reserve)
    recorder = Recorder()
    if parallel.is_main:
        has_reserve = config.prompts.reserve > 0
        recorder = RunRecorder(config.run.dir, config.train.num_iterations, has_reserve=has_reserve)
    ledger = make_ledger(config, parallel)
    train(config.train, ReplayingRank(megatron, parallel, batches), batches, batches, ledger, recorder)
    recorder.close()
    megatron.save_hf(config.run.dir / "model")
