"""One rank of `test_layouts.py`, started by torchrun: trains the same batches under one layout after another.

Arguments: a pickled list of jobs, the output directory. Jobs that follow each other under the same placement of ranks
share its process groups, which take longer to create than such a job takes to run.
"""

import gc
import json
import math
import pickle
import sys
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from async_rl.config.adapter_section import AdapterSection
from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.group_proof import join_pieces
from async_rl.method.pieces import cut, may_be_cut
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group
from async_rl.producer.cutting import num_tokens
from tests.support.finished_groups import Arriving
from tests.support.trainer.own_stores import OwnStores
from trainer.devices import Device, choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.policy import optimizer
from trainer.trainer import MegatronTrainer

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Job:
    """Batches to train under a layout, and the name of the results."""

    name: str
    checkpoint: str
    batches: list[list[Group]]
    layout: dict[str, Any]
    algorithm: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    eps: float = 1e-3
    adapter: dict[str, Any] = field(default_factory=dict)
    publishes_adapters: bool = False

    @property
    def placement(self) -> dict[str, Any]:
        """The settings that process groups depend on."""
        return {key: value for key, value in self.layout.items() if key.endswith("_parallel")}


def run(job: Job, trainer: MegatronTrainer, replica: int, num_replicas: int) -> dict[str, Any]:
    """Trains all batches; returns the statistics and rows of each step, and scores before each batch."""
    report: dict[str, Any] = {"steps": [], "rows": [], "scores": []}
    train = TrainSection(iterations=10, **job.train)
    for number, groups in enumerate(job.batches):
        trainer.before_publish()
        first = min(groups, key=lambda group: group.index)
        report["scores"].append(trainer.score(first.prompt.token_ids, [r.token_ids for r in first.responses]))
        batch = Batch(number, {group.index: group.prompt for group in groups})
        mini_batches = batch.split(train.steps_per_batch)
        arriving = Arriving(_dealt(job, number, groups, num_replicas, trainer.cuts_groups)[replica], mini_batches)
        order = TrainingOrder(arriving, train, mini_batches, replica, num_replicas)
        for _ in mini_batches:
            order.begin_mini_batch()
            rows = [row for window in trainer.windows(order) for row in trainer.accumulate(window)]
            rows = join_pieces(trainer.gather(rows))
            report["rows"].append([asdict(row) | {"max_logprob_gap": row.all_gaps.largest} for row in rows])
            report["steps"].append(asdict(trainer.optimizer_step()))
    return report


def _dealt(job: Job, number: int, groups: list[Group], num_replicas: int, cuts: bool) -> list[list[Group]]:
    """Each replica's groups of a batch, as a dock may give them: those of every second batch all go to the last one; of
    the others a group that is longer than a micro-batch, and may be cut, goes in pieces to as many as there are."""
    dealt: list[list[Group]] = [[] for _ in range(num_replicas)]
    if number % 2:
        dealt[-1] += groups
        return dealt
    for group in groups:
        rest, replica = group, group.index
        is_long = cuts and num_tokens(group) > job.layout.get("micro_batch_tokens", math.inf)
        for left in range(num_replicas, 1, -1):
            if not (is_long and may_be_cut(rest)):
                break
            piece, rest = cut(rest, math.ceil(len(rest.rollouts) / left))
            dealt[replica % num_replicas].append(piece)
            replica += 1
        dealt[replica % num_replicas].append(rest)
    return dealt


def make_trainer(job: Job, parallel: Parallel, section: TrainerSection) -> MegatronTrainer:
    # Adam divides a gradient by its own size: without a larger eps, rounding decides the steps of tiny gradients.
    with patch.object(optimizer, "EPS", job.eps):
        return MegatronTrainer(
            parallel,
            section,
            ModelSection(path=job.checkpoint, dtype=job.dtype),
            RolloutSection(),
            AlgorithmSection(**{"kl_coef": 0.1, **job.algorithm}),
            OptimizerSection(**{"learning_rate": LEARNING_RATE, **job.optimizer}),
            TrainSection(iterations=10, **job.train),
            AdapterSection(**job.adapter),
            publishes_adapters=job.publishes_adapters,
        )


def main(jobs_file: Path, out: Path, device: Device) -> None:
    torch.set_num_threads(1)
    stores = OwnStores()
    jobs: list[Job] = pickle.loads(jobs_file.read_bytes())
    for _, placed in groupby(jobs, key=lambda job: job.placement):
        stores.begin()
        first, *others = placed
        parallel = init_parallel(device, 0, TrainerSection(**first.layout))
        for job in [first, *others]:
            train_and_report(job, parallel, out)
        parallel.close()
        # Reference cycles keep the trainers alive, and these the connections of their groups, each with a thread.
        del parallel
        gc.collect()


def train_and_report(job: Job, parallel: Parallel, out: Path) -> None:
    """Writes the job's report and final weights to `out`, completely or not at all."""
    trainer = make_trainer(job, parallel, TrainerSection(**job.layout))
    report = run(job, trainer, parallel.dp_rank, parallel.num_replicas)
    if not parallel.is_main:
        trainer.export.serve()
        return
    weights = {spec.name: tensor.to("cpu", copy=True) for spec, tensor in trainer.export.stream()}
    save_file(weights, out / f"{job.name}.safetensors")
    partial = out / f"{job.name}.partial"
    partial.write_text(json.dumps(report))
    partial.rename(out / f"{job.name}.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), choose_device("cpu"))
