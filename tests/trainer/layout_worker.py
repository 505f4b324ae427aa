"""One rank of `test_layouts.py`, started by torchrun: trains the same batches under one layout after another.

Arguments: a pickled list of jobs, the output directory.
"""

import json
import os
import pickle
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from async_rl.config import (
    AlgorithmSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    TrainerSection,
    TrainSection,
)
from async_rl.training_order import TrainingOrder
from async_rl.types import Batch, Group
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.trainer import MegatronTrainer

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Job:
    """Batches to train under a layout, and what to call the results."""

    name: str
    checkpoint: str
    batches: list[list[Group]]
    port: int
    layout: dict[str, Any]
    algorithm: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"


class Arriving:
    """Groups that finish two at a time."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = list(groups)

    def ready(self, wait: bool) -> list[Group]:
        arrived, self._groups = self._groups[:2], self._groups[2:]
        return arrived


def run(job: Job, trainer: MegatronTrainer, replica: int, num_replicas: int) -> dict[str, Any]:
    """Trains all batches; the figures of each step, the rows it was taken on, and scores before each batch."""
    report: dict[str, Any] = {"steps": [], "rows": [], "scores": []}
    train = TrainSection(iterations=10, **job.train)
    for number, groups in enumerate(job.batches):
        trainer.before_publish()
        first = min(groups, key=lambda group: group.index)
        report["scores"].append(trainer.score(first.prompt.token_ids, [r.token_ids for r in first.responses]))
        batch = Batch(number, {group.index: group.prompt for group in groups})
        shares = [part.share(replica, num_replicas) for part in batch.split(train.steps_per_batch)]
        places = Batch.union(shares).prompts
        order = TrainingOrder(Arriving([group for group in groups if group.index in places]), train, shares)
        for _ in shares:
            order.begin_mini_batch()
            rows = [row for window in trainer.windows(order) for row in trainer.accumulate(window)]
            report["rows"].append([asdict(row) for row in trainer.gather(rows)])
            report["steps"].append(asdict(trainer.optimizer_step()))
    return report


def make_trainer(job: Job, parallel: Any, section: TrainerSection) -> MegatronTrainer:
    return MegatronTrainer(
        parallel,
        section,
        ModelSection(path=job.checkpoint, dtype=job.dtype),
        RolloutSection(),
        AlgorithmSection(**{"kl_coef": 0.1, **job.algorithm}),
        # Adam divides a gradient by its own size: without a larger eps, rounding decides where it is nearly zero.
        OptimizerSection(learning_rate=LEARNING_RATE, eps=1e-3),
        TrainSection(iterations=10, **job.train),
    )


def main(jobs_file: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # A store of its own for every layout: torchrun's still has the addresses of the process groups before.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for job in pickle.loads(jobs_file.read_bytes()):
        os.environ["MASTER_PORT"] = str(job.port)
        section = TrainerSection(**job.layout)
        parallel = init_parallel(choose_device("cpu"), 0, section)
        trainer = make_trainer(job, parallel, section)
        report = run(job, trainer, parallel.replica, parallel.num_replicas)
        trainer.save_hf(out / job.name)
        if parallel.is_main:
            (out / job.name / "report.json").write_text(json.dumps(report))
        parallel.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
