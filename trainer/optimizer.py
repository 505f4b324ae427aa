"""Megatron's AdamW over the policy, with the learning rate of each iteration."""

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from async_rl.config import OptimizerSection
from async_rl.errors import NonFiniteGradient

CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up, then linear decay that reaches `min_learning_rate_ratio` of the peak at the last iteration."""

    section: OptimizerSection
    num_iterations: int

    def at(self, iteration: int) -> float:
        """Learning rate of the step that ends `iteration`, counted from 0."""
        peak, warmup = self.section.learning_rate, self.section.warmup_iterations
        if iteration < warmup:
            return peak * (iteration + 1) / warmup
        progress = min(1.0, (iteration - warmup) / max(1, self.num_iterations - 1 - warmup))
        return peak * (1 - progress * (1 - self.section.min_learning_rate_ratio))


class PolicyOptimizer:
    """Steps the policy on the gradients in its DDP buffers.

    Weight decay spares biases and norms, as Megatron's default does.
    """

    def __init__(self, section: OptimizerSection, num_iterations: int, policy: DistributedDataParallel) -> None:
        self._section = section
        self._schedule = LearningRate(section, num_iterations)
        self._optimizer = _make_adam(section, policy)
        self._num_steps = 0

    def step(self) -> tuple[float, float]:
        """Clips by the global norm and steps; returns (norm before clipping, learning rate).

        Raises:
            NonFiniteGradient: the norm is infinite or not a number; the weights are left as they were.
        """
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(
                f"step {self._num_steps}: the gradient norm is {grad_norm}; no step was taken: look for a reward or "
                "log-prob that is not finite, or lower optimizer.learning_rate"
            )
        # Megatron's own clipping insists on CUDA gradients.
        scale = self._section.clip_grad_norm / (grad_norm + CLIP_EPS)
        if scale < 1.0:
            gradients = [p.grad for p in self._optimizer.get_parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, scale)
        learning_rate = self._schedule.at(self._num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step_with_ready_grads()
        self._optimizer.zero_grad()
        self._num_steps += 1
        return grad_norm, learning_rate


def _make_adam(section: OptimizerSection, policy: DistributedDataParallel) -> MegatronOptimizer:
    bf16 = next(policy.parameters()).dtype == torch.bfloat16
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    optimizer = get_megatron_optimizer(config, [policy], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron applies this factor in its own scheduler, which is not used here.
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    return optimizer
