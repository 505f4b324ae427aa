"""How well the two pools are balanced, and how many instances would balance them: pure functions on measured times.

Rollouts of an iteration can run while the trainer makes its forward and backward passes, and at no other time: during a
publish and an optimizer step no weights are there to sample from. So the shortest iteration has rollouts that take just
as long as training; fewer instances leave the trainer waiting, more of them idle. The work of a batch is taken to be
shared evenly, `num_instances * rollout_s`; the longest response of a batch does not get shorter with more instances.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT = 10
"""How many iterations the callers look back on."""

TOLERANCE = 0.1
"""Share of an instance that is not worth starting another one for: times vary more than that."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Where the time of one iteration of `seconds` went.

    `wait_s` is what the trainer waited for rollouts, `train_s` its forward and backward passes, `rollout_s` the time
    from the dispatch to the last finished group, `num_instances` how many instances sampled its `num_groups` groups.
    """

    seconds: float
    wait_s: float
    train_s: float
    rollout_s: float
    num_instances: int
    num_groups: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "IterationTimes":
        """Those of a record of `metrics.jsonl`, which has them under the same names."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    @property
    def idle_training(self) -> float:
        """Share of the iteration in which the trainer waited for rollouts."""
        return _share(self.wait_s, self.seconds)

    @property
    def idle_inference(self) -> float:
        """Share of the iteration in which no rollouts were under way."""
        return 1.0 - _share(self.rollout_s, self.seconds)

    @property
    def balancing_instances(self) -> float:
        """How many instances would take as long for the rollouts as the trainer for its passes; at most one per group.

        More instances than groups cannot help: a group is sampled at one instance.
        """
        work_s = self.num_instances * self.rollout_s
        return work_s / self.train_s if work_s < self.num_groups * self.train_s else self.num_groups


def desired_instances(recent: Sequence[IterationTimes]) -> int:
    """The number of instances that balances the pools: by the median of `recent`, never below 1."""
    median = statistics.median(times.balancing_instances for times in recent)
    return max(1, math.ceil(median - TOLERANCE))


def advise(recent: Sequence[IterationTimes]) -> str:
    """What the last iterations, at least one, say about the balance of the pools; one sentence."""
    training = statistics.median(times.idle_training for times in recent)
    inference = statistics.median(times.idle_inference for times in recent)
    now, desired = recent[-1].num_instances, desired_instances(recent)
    idle = f"training waited {training:.0%} of the time for rollouts, inference idled {inference:.0%}"
    if desired == now:
        return f"{idle}: {_instances(now)} balanced the pools"
    return f"{idle}: {_instances(desired)} would balance the pools, {now} took part"


def _instances(number: int) -> str:
    return f"{number} instance" if number == 1 else f"{number} instances"


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0
