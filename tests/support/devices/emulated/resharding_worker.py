"""One rank of `test_resharding.py`, started by torchrun: what a publish in turns takes on its emulated device.

Arguments: a checkpoint, a layout as JSON, the bytes of a parcel, the file for the main rank's report.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from trainer.devices import choose_device


def main(checkpoint: str, layout: dict[str, Any], parcel_bytes: int, out: Path) -> None:
    """Reports of each rank, in bytes: its part of the weights, and what is on its device at a publish.

    `left` stays there while the instances have it, before the publish and `after` it; `peak` is the most beside that
    while the weights are streamed to the main rank.
    """
    device = choose_device("npu")
    # MindSpeed's stand-in comes before Megatron.
    from trainer.hf.weight_export import WeightExport
    from trainer.parallel import init_parallel
    from trainer.trainer import MegatronTrainer

    section = TrainerSection(**layout)
    parallel = init_parallel(device, 0, section)
    trainer = MegatronTrainer(
        *(parallel, section, ModelSection(path=checkpoint), RolloutSection(), AlgorithmSection()),
        *(OptimizerSection(learning_rate=1e-3), TrainSection(iterations=1)),
        takes_turns=True,
    )
    npu: Any = torch.get_device_module("npu")
    model = trainer.models.policy_model
    part = sum(parameter.nbytes for parameter in model.parameters())
    export = WeightExport(model, parcel_bytes)
    whole = sum(spec.num_bytes for spec in export.specs)
    trainer.turns.offload()
    left = npu.memory_allocated()
    npu.reset_peak_memory_stats()
    with trainer.turns.weights():
        if parallel.is_main:
            num_streamed = sum(tensor.nbytes for _, tensor in export.stream())
            assert num_streamed == whole
        else:
            export.serve()
    report = {"part": part, "whole": whole, "left": left, "peak": npu.max_memory_allocated() - left}
    # Memory is free when what was queued before is done.
    npu.synchronize()
    reports = parallel.gather_json(report | {"after": npu.memory_allocated()})
    if parallel.is_main:
        out.write_text(json.dumps(reports))
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
