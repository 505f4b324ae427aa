"""Training ranks of `test_checkpoint.py`, also used by it in its own process: runs that save and resume.

Arguments: a JSON file, `{"layouts": [[TrainerSection, [Run]]], "num_ranks": 2, "kill": seconds}`. Under torchrun this
is one rank, and there is one layout. Otherwise ranks are started for each layout, one layout after the other. With
"kill" there is one rank, which is killed repeatedly, at most that many seconds after it has saved.
"""

import json
import os
import pickle
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.method.types import Group
from async_rl.shared.checkpoint_names import newest_checkpoint
from async_rl.shared.cpu.reproducible import use_reproducible_products
from trainer.checkpoint.checkpoint import Checkpoints
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"dir": "unused", "seed": 3},
    "prompts": {"source": "unused.jsonl", "prompts_per_batch": 2},
    "reward": {"name": "math"},
    # Weights change a lot in each step, with a different learning rate each time; decay distinguishes biases and norms.
    "optimizer": {
        "learning_rate": 1e-2,
        "warmup_iterations": 2,
        "min_learning_rate_ratio": 0.1,
        "weight_decay": 0.1,
        "clip_grad_norm": 1e9,
    },
    "train": {"iterations": 6},
}

NUM_KILLS = 5
TIMEOUT_S = 120


def run_config(path: str, **sections: dict[str, Any]) -> Config:
    """A run of the model at `path`; keyword arguments are differences from `SETTINGS`, by section."""
    tree = SETTINGS | {"model": {"path": path}}
    for name, section in sections.items():
        tree = tree | {name: tree.get(name, {}) | section}
    return parse_config(tree, source="test")


@dataclass(frozen=True)
class Run:
    """Trains until the iteration `until`; from the beginning, or from the checkpoint `load`; saves at `save_at`.

    Gradients are those of the pickled `batches`, or else a function of each weight alone, independent of the layout.
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
            first = checkpoints.load(Path(self.load), models.policy, trainer.optimizer, models.old, trainer.critic)
        batches = self.batches and pickle.loads(Path(self.batches).read_bytes())
        for iteration in range(first, self.until):
            if batches:
                train(trainer, batches[iteration], parallel, config.train.steps_per_batch)
            else:
                train_elementwise(trainer, iteration)
            if iteration + 1 in self.save_at:
                checkpoints.find_tensors(models.policy, trainer.optimizer, models.old, trainer.critic)
                checkpoints.save(iteration + 1, trainer.optimizer)
        checkpoints.close()
        return trainer


def make_trainer(config: Config, parallel: Parallel) -> MegatronTrainer:
    return MegatronTrainer.of(config, parallel)


def train(trainer: MegatronTrainer, batch: list[Group], parallel: Parallel, num_steps: int) -> None:
    """The steps on a replica's share of a batch."""
    trainer.before_publish()
    share = batch[parallel.dp_rank :: parallel.num_replicas]
    for step in range(num_steps):
        for group in share[step::num_steps]:
            trainer.accumulate([[group]])
        trainer.optimizer_step()


def train_elementwise(trainer: MegatronTrainer, iteration: int) -> None:
    trained = [(trainer.models.policy, trainer.optimizer)]
    if trainer.critic is not None:
        trained.append((trainer.critic.model, trainer.critic.optimizer))
    for model, optimizer in trained:
        for parameter in (each for each in model.parameters() if each.requires_grad):
            parameter.main_grad.copy_(torch.sin(7 * parameter.detach().float() + iteration))
        optimizer.step(optimizer.gradient_norm())
    trainer.discard()


def main(file: str) -> None:
    work = json.loads(Path(file).read_text())
    for layout, runs in work["layouts"]:
        if "RANK" in os.environ:
            run_all(runs, layout)
        elif "kill" in work:
            for _ in range(NUM_KILLS):
                run_and_kill(runs[0], layout, random.uniform(0, work["kill"]))
        else:
            run_on_ranks(work["num_ranks"], runs, layout)


def run_all(runs: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # The kernels of the tests' own process (conftest.py), whose roots are rounded otherwise on processors of Intel.
    with suppress(ConfigError):
        use_reproducible_products()
    parallel = init_parallel(choose_device("cpu"), 3, TrainerSection(**layout))
    for run in runs:
        Run(**run)(parallel)
    parallel.close()


def fork(runs: list[dict[str, Any]], layout: dict[str, Any], **environment: str) -> int:
    """Forks a process that runs `run_all`; cheaper than a new program, and safe while this one has only imported."""
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)
        os.environ.update(environment)
        run_all(runs, layout)
        os._exit(0)
    return child


def run_on_ranks(num_ranks: int, runs: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    # The environment that torchrun sets for its ranks.
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
    }
    children = {fork(runs, layout, RANK=str(rank), **common) for rank in range(num_ranks)}
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise RuntimeError(f"a rank of the layout {layout} ended with status {status}")


def run_and_kill(run: dict[str, Any], layout: dict[str, Any], after_s: float) -> None:
    """Resumes a run from its newest checkpoint, and kills it after it has saved another."""
    directory = Path(run["directory"])
    newest = newest_checkpoint(directory)
    child = fork([run | {"load": newest and str(newest)}], layout)
    while newest_checkpoint(directory) == newest:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended"
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


if __name__ == "__main__":
    main(sys.argv[1])
