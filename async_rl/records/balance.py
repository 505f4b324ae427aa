"""How well the two pools are balanced, and how many instances would balance them: pure functions on measured times.

Rollouts of an iteration can run only during the trainer's forward and backward passes: during a publish and an
optimizer step there are no weights to sample from. So an iteration is shortest when the rollouts take exactly as long
as training; with fewer instances the trainer waits, with more they are idle. The work of a batch is assumed to be
divided evenly, `num_instances * rollout_s`; more instances do not shorten the longest response of a batch.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT = 10
"""How many iterations the callers take into account."""

TOLERANCE = 0.1
"""Share of an instance for which starting another one is not worthwhile: times vary more than that."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """How the time of one iteration of `seconds` was spent.

    `wait_s` is how long the trainer waited for rollouts, `train_s` its forward and backward passes, `rollout_s` the
    time from the dispatch to the last finished group, `num_instances` the instances that sampled the `num_groups`.
    """

    seconds: float
    wait_s: float
    train_s: float
    rollout_s: float
    num_instances: int
    num_groups: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "IterationTimes":
        """From a record of `metrics.jsonl`, which has the same names."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})

    @property
    def idle_training(self) -> float:
        """Share of the iteration in which the trainer waited for rollouts."""
        return _share(self.wait_s, self.seconds)

    @property
    def idle_inference(self) -> float:
        """Share of the iteration in which no rollouts were running."""
        return 1.0 - _share(self.rollout_s, self.seconds)

    @property
    def balancing_instances(self) -> float:
        """Number of instances whose rollouts would take as long as the trainer's passes; at most one per group.

        More instances than groups have no effect: a group is sampled at one instance.
        """
        work_s = self.num_instances * self.rollout_s
        return work_s / self.train_s if work_s < self.num_groups * self.train_s else self.num_groups


def overlap_bound_s(*, publish_s: float, rollout_s: float, train_s: float, step_s: float, last_step_s: float) -> float:
    """The least time of an iteration with these parts, in seconds.

    Nothing overlaps a publish, and the last step follows all groups; rollouts overlap training and earlier steps:
    publish_s + max(rollout_s + last_step_s, train_s + step_s). With one step per batch this is
    publish_s + max(rollout_s, train_s) + step_s. The first group's rollout and the training of the last window are
    not part of it, although neither can overlap the other pool: smaller groups and windows make them shorter.
    """
    return publish_s + max(rollout_s + last_step_s, train_s + step_s)


def overlap_efficiency(bound_s: float, seconds: float) -> float:
    """bound_s / seconds, between 0 and 1: 1 if the pools overlapped as far as they can at all."""
    return _share(bound_s, seconds)


def desired_instances(recent: Sequence[IterationTimes]) -> int:
    """The number of instances that balances the pools: by the median of `recent`, never below 1."""
    median = statistics.median(times.balancing_instances for times in recent)
    return max(1, math.ceil(median - TOLERANCE))


def advise(recent: Sequence[IterationTimes], *, takes_turns: bool = False) -> str:
    """The balance of the pools in the last iterations, at least one; one sentence.

    No number of instances balances pools that take turns, where each waits while the other one works.
    """
    training = statistics.median(times.idle_training for times in recent)
    inference = statistics.median(times.idle_inference for times in recent)
    now, desired = recent[-1].num_instances, desired_instances(recent)
    idle = f"training waited {training:.0%} of the time for rollouts, inference idled {inference:.0%}"
    if takes_turns:
        return f"{idle}: the pools take turns"
    if desired == now:
        return f"{idle}: {_instances(now)} balanced the pools"
    return f"{idle}: {_instances(desired)} would balance the pools, {now} took part"


def _instances(number: int) -> str:
    return f"{number} instance" if number == 1 else f"{number} instances"


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0
