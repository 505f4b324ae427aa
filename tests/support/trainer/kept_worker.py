"""What autograd keeps of a micro-batch; as a program one rank of `test_memory_forecast.py`, started by torchrun.

Arguments: a pickled list of (checkpoint, trainer section), pickled groups, the output directory.
"""

import json
import pickle
import sys
from pathlib import Path

import torch

from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from tests.support.trainer.layout_worker import Job, make_trainer
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.trainer import MegatronTrainer


def kept_bytes(trainer: MegatronTrainer, groups: list[Group]) -> int:
    """Of all tensors that autograd keeps of one micro-batch, each memory counted once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in trainer.models.policy.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.accumulate([groups])
    return sum(kept.values())


def main(cases_file: Path, groups_file: Path, out: Path) -> None:
    torch.set_num_threads(1)
    cases = pickle.loads(cases_file.read_bytes())
    groups = pickle.loads(groups_file.read_bytes())
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection(**cases[0][1]))
    counted = []
    for checkpoint, layout in cases:
        job = Job("", checkpoint, [], layout, {"kl_coef": 0.0})
        counted.append(kept_bytes(make_trainer(job, parallel, TrainerSection(**layout)), groups))
    (out / f"{parallel.rank}.json").write_text(json.dumps(counted))
    parallel.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
