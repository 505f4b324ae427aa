"""One rank of `test_data_parallel.py`, started by torchrun: trains its share of each batch and reports what it saw.

Arguments: checkpoint directory, pickled batches (each a list of shares, each a list of groups), output directory.
"""

import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from async_rl.config import AlgorithmSection, ModelSection, OptimizerSection, RolloutSection, TrainerSection
from trainer.devices import choose_device
from trainer.parallel import init_parallel
from trainer.trainer import MegatronTrainer


def main(checkpoint: str, batches_file: str, out: Path) -> None:
    torch.set_num_threads(1)
    parallel = init_parallel(choose_device("cpu"), 0, TrainerSection())
    trainer = MegatronTrainer(
        parallel,
        TrainerSection(),
        ModelSection(path=checkpoint),
        RolloutSection(),
        AlgorithmSection(kl_coef=0.1),
        OptimizerSection(learning_rate=1e-2),
        num_iterations=10,
    )
    report = {"replica": parallel.replica, "num_replicas": parallel.num_replicas, "steps": [], "rows": []}
    for shares in pickle.loads(Path(batches_file).read_bytes()):
        rows = [trainer.accumulate(group) for group in shares[parallel.replica]]
        report["rows"].append([row.index for row in trainer.gather(rows)])
        report["steps"].append(asdict(trainer.optimizer_step()))
    report["gathered"] = parallel.gather_json({"replica": parallel.replica, "text": "é" * parallel.replica})
    report["broadcast"] = parallel.broadcast_json(["from", parallel.replica] * (parallel.replica + 1), src=1)
    trainer.save_hf(out / "policy")
    (out / f"report{parallel.replica}.json").write_text(json.dumps(report))
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
