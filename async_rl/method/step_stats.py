"""The figures of an optimizer step: from the trainer to the records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(frozen=True, slots=True)
class StepStats:
    """Figures of one optimizer step, over the whole batch: `loss` is normalised, `metrics` are named means.

    `num_untrained` groups had no gradient, and no backward pass was run for them. `skipped`: the gradient was not
    finite and no step was taken; weights and moments are unchanged. Memory peaks are the highest of all ranks: of their
    processes, and of tensors on their devices, since they began; None on a CPU.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_untrained: int = 0
    skipped: bool = False
    memory_peak_bytes: int | None = None
    device_memory_peak_bytes: int | None = None

    @classmethod
    def mean(cls, steps: "Sequence[StepStats]") -> "StepStats":
        """The figures of several steps as one: means over the steps taken, if any, and the highest memory peaks;
        `num_untrained` is summed. A metric that not every step has is the mean of those that have it."""
        taken = [step for step in steps if not step.skipped]
        counted = taken or steps
        values: dict[str, list[float]] = {}
        for step in counted:
            for name, value in step.metrics.items():
                values.setdefault(name, []).append(value)
        return cls(
            _mean([step.loss for step in counted]),
            _mean([step.grad_norm for step in counted]),
            _mean([step.learning_rate for step in counted]),
            {name: _mean(each) for name, each in values.items()},
            sum(step.num_untrained for step in steps),
            not taken,
            highest(step.memory_peak_bytes for step in steps),
            highest(step.device_memory_peak_bytes for step in steps),
        )


def _mean(values: Sequence[float]) -> float:
    """NaN where infinities of both signs meet, or where the sum is too large for a float."""
    try:
        return fmean(values)
    except (ValueError, OverflowError):
        return math.nan


def highest(values: Iterable[int | None]) -> int | None:
    """The largest of the values that are known."""
    return max((value for value in values if value is not None), default=None)
