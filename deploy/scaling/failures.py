"""What failures of devices cost a run: time, since it loses no group and trains none twice."""

from dataclasses import dataclass, replace
from statistics import fmean

from deploy.scaling.batches import Batches
from deploy.scaling.costs import Measured
from deploy.scaling.simulation import SetUp

MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the rollouts' time, at which an instance is lost in a simulation."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures of one pool: how many iterations pass between two, and what one of them costs, in seconds."""

    iterations: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class Failures:
    instances: Kind
    training: Kind
    share: float
    """Of the time, lost to all of them."""


def failures_of(
    run: Measured, batches: Batches, set_up: SetUp, mtbf_s: float, restart_s: float, checkpoint_every: int
) -> Failures:
    """Of devices that fail independently, each after `mtbf_s` in the mean.

    An instance's responses go on at others, which compute their prefixes again, and it is absent for `restart_s`. A
    training rank's failure ends all ranks: after `restart_s` they go on from the newest checkpoint, half of
    `checkpoint_every` iterations ago in the mean.
    """
    of_instance, of_replica = run.devices_of
    seconds = batches.mean(set_up).seconds
    lost_s = fmean(max(0.0, batches.with_loss(set_up, at, restart_s).seconds - seconds) for at in MOMENTS)
    if set_up.num_instances > 1:
        fewer = replace(set_up, num_instances=set_up.num_instances - 1)
        lost_s += max(0.0, batches.mean(fewer).seconds - seconds) * restart_s / seconds
    instances = Kind(mtbf_s / (set_up.num_instances * of_instance) / seconds, lost_s)
    training = Kind(mtbf_s / (set_up.num_replicas * of_replica) / seconds, restart_s + checkpoint_every / 2 * seconds)
    lost = sum(kind.cost_s / (kind.iterations * seconds) for kind in (instances, training))
    return Failures(instances, training, lost / (1 + lost))
