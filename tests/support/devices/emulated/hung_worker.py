"""A rank that is alone on an emulated NPU; a kernel of its second window hangs. The argument is its checkpoint."""

import random
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from tests.support.groups import random_group
from trainer.devices import choose_device

LIMIT_S = 3.0
KERNEL = 50
"""The first of the window are those of its inputs and of its first layers."""


def main(checkpoint: str) -> None:
    device = choose_device("npu")
    # MindSpeed's stand-in comes before Megatron.
    from trainer.device_watch import LOST_LIMITS, DeviceWatch
    from trainer.parallel import init_parallel
    from trainer.rank import TrainingRank
    from trainer.shutdown import Shutdown
    from trainer.stop_signal import StopSignal
    from trainer.trainer import MegatronTrainer

    section = TrainerSection()
    parallel = init_parallel(device, 0, section)
    megatron: Any = MegatronTrainer(
        *(parallel, section, ModelSection(path=checkpoint), RolloutSection(), AlgorithmSection()),
        *(OptimizerSection(learning_rate=1e-3), TrainSection(iterations=1)),
    )
    group = random_group(0, 7, (5, 1, 9), random.Random(0))
    megatron.windows = lambda *_: iter([[[group]], [[group]]])
    rank = TrainingRank(megatron, parallel, "run", None, Shutdown(parallel, StopSignal(), 60.0))
    order: Any = SimpleNamespace()
    for window in rank.windows(order):
        rank.accumulate(window)
        print("a window is trained", flush=True)
        # The first one compiles.
        megatron.device_watch = DeviceWatch(device.DEVICE, 1, LIMIT_S / LOST_LIMITS)
        torch_npu: Any = import_module("torch_npu")
        torch_npu.configure(faults=f"hang:{KERNEL}")


if __name__ == "__main__":
    main(sys.argv[1])
