"""One training step of a small model, the same on every device; as a program it takes DEVICE and prints the results."""

import json
import random
import sys
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.method.types import Group
from async_rl.shared.model_shape import ModelShape
from tests.support.groups import random_group
from trainer.batching.group_slice import slices_of
from trainer.batching.shared_prompt import make_micro_batch
from trainer.devices import choose_device
from trainer.model.gpt import build_model
from trainer.parallel import Parallel, init_parallel
from trainer.policy.optimizer import PolicyOptimizer

SHAPE = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=64,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope=None,
    tied=True,
)


def train_step(parallel: Parallel, dtype: torch.dtype) -> dict[str, Any]:
    """Log-probs before the step and after it, and the gradient's norm; weights and tokens are always the same."""
    model = build_model(SHAPE, dtype, parallel, TrainerSection())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * noise + (1 if "norm" in name else 0))
    policy = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    section = OptimizerSection(learning_rate=1e-2, clip_grad_norm=1e9)
    optimizer = PolicyOptimizer(section, TrainSection(iterations=1), policy, False)
    micro_batch = make_micro_batch(slices_of(_groups()), parallel.device.DEVICE)
    before, *_ = policy(micro_batch, 0.8)
    # Some responses should become more likely and some less likely.
    signs_N = torch.arange(len(before), device=before.device).remainder(3).sub(1).to(before.dtype)
    (before * signs_N).sum().backward()
    finalize_model_grads([policy])
    policy.scale_gradients(1.0 / len(before))
    grad_norm = optimizer.gradient_norm()
    optimizer.step(grad_norm)
    with torch.no_grad():
        after, *_ = model(micro_batch, 0.8)
    return {"before": before.tolist(), "after": after.tolist(), "grad_norm": grad_norm}


def _groups() -> list[Group]:
    rng = random.Random(0)
    shapes = ((9, (5, 1, 12)), (1, (3, 4)), (30, (7, 2)))
    return [random_group(i, prompt, lens, rng, SHAPE.vocab_size) for i, (prompt, lens) in enumerate(shapes)]


if __name__ == "__main__":
    parallel = init_parallel(choose_device(sys.argv[1]), 0, TrainerSection())
    print(json.dumps(train_step(parallel, torch.bfloat16)))
    parallel.close()
