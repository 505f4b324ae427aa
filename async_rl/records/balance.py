"""How well the two pools are balanced, and how many instances would balance them: pure functions on measured times.

Rollouts of an iteration can run only during the trainer's forward and backward passes: during a publish and an
optimizer step there are no weights to sample from. So an iteration is shortest when the rollouts take exactly as long
as training; with fewer instances the trainer waits, with more they are idle.

Of n instances the rollouts take a + b / n for each token of a response: b is divided among instances, a is not, such as
the decoding steps of the longest response. Where the pool has had one size only, a is taken for 0.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

NUM_RECENT = 10
"""The iterations that count, of each number of instances."""

MAX_AGE = 100
"""Iterations after which those of a number of instances are forgotten: a run learns, and its responses change. Not
those of the newest other number, without which all would seem to be divided, and the advice would jump."""

TOLERANCE = 0.1
"""Share of an instance for which starting another one is not worthwhile: times vary more than that."""


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """How the time of one iteration of `seconds` was spent.

    `wait_s` is how long the trainer waited for rollouts, `train_s` its forward and backward passes, `rollout_s` the
    time from the dispatch to the last finished group, `num_instances` the instances that sampled the `num_groups`,
    which have `response_tokens` together.
    """

    seconds: float
    wait_s: float
    train_s: float
    rollout_s: float
    num_instances: int
    num_groups: int
    response_tokens: int
    iteration: int = 0

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


def remember(history: list[IterationTimes], times: IterationTimes) -> None:
    """Adds an iteration, and forgets the oldest one that had as many instances, if there are more than `NUM_RECENT`,
    and others by their age (`MAX_AGE`)."""
    history.append(times)
    same = [each for each in history if each.num_instances == times.num_instances]
    if len(same) > NUM_RECENT:
        history.remove(same[0])
    others = [each.num_instances for each in history if each.num_instances != times.num_instances]
    kept = {times.num_instances, *others[-1:]}
    oldest = times.iteration - MAX_AGE
    history[:] = [each for each in history if each.num_instances in kept or each.iteration > oldest]


def desired_instances(history: Sequence[IterationTimes]) -> int:
    """The number of instances that balances the pools: the least with which rollouts take no longer than training.

    But none is worthwhile beside 2 b / a others or more, where over two thirds of the rollouts' time are what none
    shortens. There are no more than groups, each of which is sampled at one instance, and never below 1. For fewer
    instances than there have ever been, a is taken for 0. Medians of the last `NUM_RECENT` of the `history`.
    """
    recent = history[-NUM_RECENT:]
    per_token = _rollout_costs(history)
    train_s = statistics.median(each.train_s for each in recent)
    tokens = statistics.median(max(1, each.response_tokens) for each in recent)
    most, least = recent[-1].num_groups, min(per_token)

    def balancing(fixed: float, divided: float) -> float:
        left_s = train_s - fixed * tokens
        return divided * tokens / left_s if divided * tokens < most * left_s else most

    desired = fewest = balancing(0.0, least * per_token[least])
    if len(per_token) > 1 and fewest > least:
        divided, fixed = statistics.linear_regression([1 / number for number in per_token], list(per_token.values()))
        worthwhile = math.floor(2 * divided / fixed + TOLERANCE) + 1 if fixed > 0 else most
        desired = max(least, min(worthwhile, balancing(fixed, divided)))
    return max(1, math.ceil(desired - TOLERANCE))


def _rollout_costs(history: Sequence[IterationTimes]) -> dict[int, float]:
    """Seconds of rollouts for each token of a response, which grow longer or shorter while a run learns, with each
    number of instances that there has been."""
    by_number: dict[int, list[float]] = {}
    for each in history:
        by_number.setdefault(max(1, each.num_instances), []).append(each.rollout_s / max(1, each.response_tokens))
    return {number: statistics.median(seconds) for number, seconds in by_number.items()}


def advise(recent: Sequence[IterationTimes], desired: int | None) -> str:
    """The balance of the pools in the last iterations, at least one; one sentence.

    Args:
        desired: `desired_instances`; None of pools that take turns: there each waits while the other one works.
    """
    training = statistics.median(times.idle_training for times in recent)
    inference = statistics.median(times.idle_inference for times in recent)
    now = recent[-1].num_instances
    idle = f"training waited {training:.0%} of the time for rollouts, inference idled {inference:.0%}"
    if desired is None:
        return f"{idle}: the pools take turns"
    if desired == now:
        return f"{idle}: {_instances(now)} balanced the pools"
    return f"{idle}: {_instances(desired)} would balance the pools, {now} took part"


def _instances(number: int) -> str:
    return f"{number} instance" if number == 1 else f"{number} instances"


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0
