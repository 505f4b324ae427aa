"""Cost and benefit of keeping the reference model's weights on the host: peak device memory and time of a window.

    python -m benchmarks.frozen_weights --json [--device cuda] [--repeats N]

A random Qwen3-shaped policy with a reference accumulates the same window with `trainer.frozen_weights` "device" and
"host", in turn. Device memory is the allocator's peak on a GPU. On a CPU, which has no separate device memory, it is
the weights and gradient buffers that are resident between windows plus the peak allocation of a window, without the
copies on the host. The last line is one JSON object: peak bytes and median seconds of both, and the bytes of the
reference's weights.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from async_rl.config.algorithm_section import AlgorithmSection
from async_rl.config.rollout_section import RolloutSection
from async_rl.config.sections import ModelSection
from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.token_arrays import Logprobs, TokenIds
from async_rl.method.types import Group, Prompt, Response
from benchmarks.common.memory import allocated
from benchmarks.common.random_model import save_random_qwen3
from trainer.devices import choose_device
from trainer.parallel import Parallel, init_parallel
from trainer.trainer import MegatronTrainer

Placement = Literal["device", "host"]
VOCAB_SIZE = 4096
SIZES = {"small": (4, 512), "tiny": (2, 64)}
"""(layers, hidden size)."""
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_RESPONSES, NUM_GROUPS = 64, 128, 8, 2


def make_checkpoint(path: Path, size: str) -> None:
    layers, hidden = SIZES[size]
    save_random_qwen3(
        path,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
    )


def make_trainer(checkpoint: Path, placement: Placement, parallel: Parallel) -> MegatronTrainer:
    return MegatronTrainer(
        parallel,
        TrainerSection(frozen_weights=placement),
        ModelSection(path=str(checkpoint), dtype="float32" if parallel.device.DEVICE.type == "cpu" else "bfloat16"),
        RolloutSection(),
        AlgorithmSection(kl_coef=0.1),
        OptimizerSection(),
        TrainSection(iterations=1),
    )


def make_groups() -> list[Group]:
    draw = random.Random(0)

    def tokens(count: int) -> TokenIds:
        return TokenIds(draw.randrange(VOCAB_SIZE) for _ in range(count))

    def response() -> Response:
        return Response(
            token_ids=tokens(RESPONSE_TOKENS),
            logprobs=Logprobs([-8.0] * RESPONSE_TOKENS),
            text="",
            finish_reason="length",
            weight_spans=(),
            instance="",
        )

    return [
        Group(
            iteration=0,
            index=i,
            prompt=Prompt(str(i), tokens(PROMPT_TOKENS), {}),
            responses=tuple(response() for _ in range(NUM_RESPONSES)),
            rewards=tuple(float(j % 2) for j in range(NUM_RESPONSES)),
            weight_version="v",
            started_s=0.0,
            finished_s=0.0,
        )
        for i in range(NUM_GROUPS)
    ]


def peak_bytes(trainer: MegatronTrainer, window: Sequence[Sequence[Group]], device: torch.device) -> int:
    """Peak device memory of the trainer and one window."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        trainer.accumulate(window)
        return torch.accelerator.max_memory_allocated(device)
    models = trainer.models
    assert models.reference is not None, "what is measured has a KL term"
    resident: list[torch.Tensor] = [*models.policy.parameters(), *models.reference.parameters()]
    gradients: list[torch.Tensor] = [p.main_grad for p in models.policy.parameters()]
    return sum(t.nbytes for t in [*resident, *gradients]) + allocated(lambda: trainer.accumulate(window)).peak_bytes


def run(size: str, repeats: int, device_name: str) -> dict[str, Any]:
    """Measures both placements, with one trainer at a time, since they share a device's memory."""
    parallel = init_parallel(choose_device(device_name), 0, TrainerSection())
    device = parallel.device.DEVICE
    window = [make_groups()]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory), size)
        for placement in ("device", "host"):
            trainer = make_trainer(Path(directory), placement, parallel)
            trainer.accumulate(window)
            results[f"peak_bytes_{placement}"] = peak_bytes(trainer, window, device)
            results[f"seconds_{placement}"] = round(statistics.median(_seconds(trainer, window, repeats)), 4)
            results["reference_bytes"] = sum(p.nbytes for p in trainer.models.policy.parameters())
            del trainer
    parallel.close()
    return results


def _seconds(trainer: MegatronTrainer, window: Sequence[Sequence[Group]], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        trainer.accumulate(window)  # reads its log-probs back, and so waits for the device
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen_weights")
    parser.add_argument("--json", action="store_true", help="as the other benchmarks have it; nothing else is printed")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu (default: %(default)s)")
    options = parser.parse_args()
    print(json.dumps(run(options.size, options.repeats, options.device)))


if __name__ == "__main__":
    main()
