"""Training ranks of `test_checkpoint.py`, also used by it in its own process: runs that save and resume.

Arguments: a JSON file, `[{"layout": TrainerSection, "runs": [Run]}]`; everything in it runs in this order.
"""

import json
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_rl.config import Config, TrainerSection, parse_config
from async_rl.types import Group
from trainer.checkpoint import Checkpoints
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

SETTINGS = {
    "run": {"dir": "unused", "seed": 3},
    "prompts": {"source": "unused.jsonl", "prompts_per_batch": 2},
    "reward": {"name": "math"},
    # Weights move far in each step, at another rate each time; decay sets biases and norms apart.
    "optimizer": {
        "learning_rate": 1e-2,
        "warmup_iterations": 2,
        "min_learning_rate_ratio": 0.1,
        "weight_decay": 0.1,
        "clip_grad_norm": 1e9,
    },
    "train": {"iterations": 6},
}


def run_config(path: str, **sections: dict[str, Any]) -> Config:
    """A run of the model at `path`; keyword arguments are what differs from `SETTINGS`, by section."""
    tree = SETTINGS | {"model": {"path": path}}
    for name, section in sections.items():
        tree = tree | {name: tree.get(name, {}) | section}
    return parse_config(tree, source="test")


@dataclass(frozen=True)
class Run:
    """Trains until the iteration `until`; from the beginning, or from the checkpoint `load`; saves at `save_at`.

    Gradients are those of the pickled `batches`, or else a function of each weight alone, which no layout changes.
    """

    model: str
    directory: str
    until: int
    save_at: tuple[int, ...]
    sections: dict[str, Any]
    load: str | None = None
    batches: str | None = None

    def __call__(self, parallel: Parallel) -> MegatronTrainer:
        config = run_config(self.model, **self.sections)
        trainer = make_trainer(config, parallel)
        checkpoints = Checkpoints(Path(self.directory), 9, parallel, config)
        models, first = trainer.models, 0
        if self.load is not None:
            first, state = checkpoints.load(Path(self.load), models.policy, trainer.optimizer, models.old)
            assert state == {"saved_at": first}
        batches = self.batches and pickle.loads(Path(self.batches).read_bytes())
        for iteration in range(first, self.until):
            if batches:
                train(trainer, batches[iteration], parallel)
            else:
                train_elementwise(trainer, iteration)
            if iteration + 1 in self.save_at:
                state = {"saved_at": iteration + 1}
                checkpoints.save(iteration + 1, models.policy, trainer.optimizer, models.old, state)
        checkpoints.close()
        return trainer


def make_trainer(config: Config, parallel: Parallel) -> MegatronTrainer:
    return MegatronTrainer(
        parallel,
        config.trainer,
        config.model,
        config.rollout,
        config.algorithm,
        config.optimizer,
        config.train,
    )


def train(trainer: MegatronTrainer, batch: list[Group], parallel: Parallel) -> None:
    """One step on a replica's share of a batch."""
    for group in batch[parallel.replica :: parallel.num_replicas]:
        trainer.accumulate([[group]])
    trainer.optimizer_step()


def train_elementwise(trainer: MegatronTrainer, iteration: int) -> None:
    for parameter in trainer.models.policy.parameters():
        parameter.main_grad.copy_(torch.sin(7 * parameter.detach().float() + iteration))
    trainer.optimizer.step()
    trainer.discard()


def main(file: str) -> None:
    torch.set_num_threads(1)
    for number, work in enumerate(json.loads(Path(file).read_text())):
        # Names of its own in torchrun's store for the process groups of each layout.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        parallel = init_parallel(choose_device("cpu"), 3, TrainerSection(**work["layout"]))
        for run in work["runs"]:
            Run(**run)(parallel)
        parallel.close()


if __name__ == "__main__":
    main(sys.argv[1])
