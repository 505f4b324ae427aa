"""Megatron's AdamW over the policy, or over a critic, with the learning rate of each iteration."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from async_rl.config.train_section import OptimizerSection, TrainSection
from async_rl.errors import NonFiniteGradient
from trainer.policy.optimizer_state import ParameterState, parameter_states, set_num_steps

CLIP_EPS = 1e-6

BETA1, EPS = 0.9, 1e-8
"""AdamW's own defaults, which other trainers have, too."""

MAX_SKIPS_IN_A_ROW = 3
"""A gradient spike is caused by one batch, and every batch is sampled again; weights whose gradient is not finite on
several batches in a row will not recover, and continuing would waste the run's time."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """How many steps were taken, how many were skipped, and how many were skipped since the last one taken.

    Adam's bias correction follows the number of steps taken, the learning rate the number of all steps, since it
    belongs to the iteration.
    """

    taken: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0

    @property
    def all(self) -> int:
        return self.taken + self.skipped


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up, then decay that reaches `min_learning_rate_ratio` r of the peak at the last iteration.

    Of the share p of the way there the rate is 1 - (1 - r) * p of the peak, or with a cosine
    1 - (1 - r) * (1 - cos(pi * p)) / 2. All of it after the first `num_held` iterations, in which it is 0.
    """

    section: OptimizerSection
    num_iterations: int
    num_held: int = 0

    def at_iteration(self, iteration: int) -> float:
        """Learning rate of the step that ends `iteration`, counted from 0."""
        peak, warmup = self.section.learning_rate, self.section.warmup_iterations
        number, last = iteration - self.num_held, self.num_iterations - self.num_held - 1
        if number < 0:
            return 0.0
        if number < warmup:
            return peak * (number + 1) / warmup
        progress = min(1.0, (number - warmup) / max(1, last - warmup))
        if self.section.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return peak * (1 - progress * (1 - self.section.min_learning_rate_ratio))


class PolicyOptimizer:
    """Steps the policy, or a critic, on the gradients in its DDP buffers.

    Weight decay does not apply to biases and norms, as is Megatron's default.
    """

    def __init__(
        self,
        section: OptimizerSection,
        train: TrainSection,
        policy: DistributedDataParallel,
        distributed: bool,
        num_held: int = 0,
    ) -> None:
        """With `distributed`, the replicas share the optimizer's state (Megatron's distributed optimizer).

        In the first `num_held` iterations steps add to the moments and leave the weights as they are.
        """
        self._section = section
        self._schedule = LearningRate(section, train.num_iterations, num_held)
        self._steps_per_iteration = train.steps_per_batch
        self._optimizer = _make_adam(section, policy, distributed)
        self._counts = StepCounts()
        self._resumed_at = 0
        self._resumed_counts = StepCounts()

    @property
    def counts(self) -> StepCounts:
        return self._counts

    def parameter_states(self) -> Iterator[ParameterState]:
        """This rank's master weights and moments, as views: values written to them take effect with the next step."""
        return parameter_states(self._optimizer)

    def resume(self, counts: StepCounts, iteration: int) -> None:
        """Continues after these steps, with the first one of `iteration`, whatever number of steps those before it had.

        Master weights and moments must have been filled through `parameter_states`.
        """
        self._resumed_at, self._resumed_counts = iteration, counts
        self.go_back(counts)

    def go_back(self, counts: StepCounts) -> None:
        """Forgets the steps after these, all of which were skipped."""
        set_num_steps(self._optimizer, counts.taken)
        self._counts = counts

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        num_steps = self._counts.all - self._resumed_counts.all
        return self._schedule.at_iteration(self._resumed_at + num_steps // self._steps_per_iteration)

    def gradient_norm(self) -> float:
        """The global norm of the gradients in the buffers, for `step`, or for `skip` if it is not finite."""
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def skip(self, grad_norm: float) -> None:
        """Leaves weights and moments unchanged; the learning rate schedule advances.

        Raises:
            NonFiniteGradient: too many steps in a row were skipped.
        """
        problem = f"step {self._counts.all}: the gradient norm is {grad_norm}; no step was taken"
        self._optimizer.zero_grad()
        if self._counts.skipped_in_a_row == MAX_SKIPS_IN_A_ROW:
            raise NonFiniteGradient(
                f"{problem}, nor on the {MAX_SKIPS_IN_A_ROW} before it: the weights themselves give such gradients, "
                "or rewards as large as 1e15: go on from an earlier checkpoint with a lower optimizer.learning_rate"
            )
        self._counts = StepCounts(self._counts.taken, self._counts.skipped + 1, self._counts.skipped_in_a_row + 1)

    def step(self, grad_norm: float) -> None:
        """Clips by the global norm, which is finite, and steps."""
        # Megatron's own clipping requires CUDA gradients.
        scale = self._section.clip_grad_norm / (grad_norm + CLIP_EPS)
        if scale < 1.0:
            parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._optimizer.step_with_ready_grads()
        self._optimizer.zero_grad()
        self._counts = StepCounts(self._counts.taken + 1, self._counts.skipped)


def _make_adam(section: OptimizerSection, policy: DistributedDataParallel, distributed: bool) -> MegatronOptimizer:
    # Adapters are float32 beside a model in bfloat16.
    bf16 = any(p.dtype == torch.bfloat16 for p in policy.parameters() if p.requires_grad)
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adam_beta1=BETA1,
        adam_beta2=section.beta2,
        adam_eps=EPS,
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
