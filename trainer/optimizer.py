"""Megatron's AdamW over the policy, with the learning rate of each iteration."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from async_rl.config import OptimizerSection, TrainSection
from async_rl.errors import NonFiniteGradient
from trainer.optimizer_state import ParameterState, parameter_states, set_num_steps

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

    def __init__(
        self, section: OptimizerSection, train: TrainSection, policy: DistributedDataParallel, distributed: bool
    ) -> None:
        """With `distributed`, the replicas share the optimizer's state (Megatron's distributed optimizer)."""
        self._section = section
        self._schedule = LearningRate(section, train.iterations)
        self._steps_per_iteration = train.steps_per_batch
        self._optimizer = _make_adam(section, policy, distributed)
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """How many steps it has taken, which the learning rate follows."""
        return self._num_steps

    def parameter_states(self) -> Iterator[ParameterState]:
        """This rank's master weights and moments, as views: what is written to them counts from the next step on."""
        return parameter_states(self._optimizer)

    def resume(self, num_steps: int) -> None:
        """Goes on after so many steps; master weights and moments were filled through `parameter_states` before."""
        set_num_steps(self._optimizer, num_steps)
        self._num_steps = num_steps

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
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        learning_rate = self._schedule.at(self._num_steps // self._steps_per_iteration)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step_with_ready_grads()
        self._optimizer.zero_grad()
        self._num_steps += 1
        return grad_norm, learning_rate


def _make_adam(section: OptimizerSection, policy: DistributedDataParallel, distributed: bool) -> MegatronOptimizer:
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
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(config, [policy], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron applies this factor in its own scheduler, which is not used here.
        group["weight_decay"] = section.weight_decay * group["wd_mult"]
    return optimizer
