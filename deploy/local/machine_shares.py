"""Shares a machine among the processes of a run: pure arithmetic on cores and devices; for `deploy.local.plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.local.machine import VISIBLE, Machine

MAX_THREADS = 16
"""Threads of one process at most: with more, operators on a host gain little, and synchronization costs grow."""


@dataclass(frozen=True, slots=True)
class Share:
    """The resources of one process: the cores it is pinned to (none: any), threads per worker, devices."""

    cores: tuple[int, ...]
    threads: int
    devices: tuple[str, ...]
    seen: tuple[str, ...] = ()
    """Devices on which it computes nothing, but maps the trainer's weights; visible after its own."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The demand of one process: `workers` that compute, each on a device if there are any.

    `fixed_core` is for the embedded engine on a CPU: one core and one thread measured fastest.
    """

    workers: int
    fixed_core: bool = False


def share_out(config: Config, machine: Machine, *, with_trainer: bool = True) -> tuple[list[Share], Share]:
    """The shares of all instances and of the trainer, which is one process to the launcher.

    Raises:
        ConfigError: there are too few devices.
    """
    on_cpu = config.trainer.device == "cpu"
    embedded = on_cpu and config.inference.engine == "transformers"
    claims = [Claim(config.inference.tensor_parallel, embedded) for _ in range(config.inference.num_instances)]
    if with_trainer:
        claims.append(Claim(config.trainer.num_local_ranks))
    devices = [()] * len(claims) if on_cpu else _share_devices(config, claims, machine, with_trainer)
    cores = share_cores(machine.cores, claims, spare=not on_cpu)
    shares = [
        Share(its_cores, _threads(claim, its_cores), its_devices)
        for claim, its_cores, its_devices in zip(claims, cores, devices, strict=True)
    ]
    if not with_trainer:
        return shares, Share((), 1, ())
    *instances, trainer = shares
    if config.publish.transport == "ipc":
        instances = [replace(share, seen=trainer.devices[:1]) for share in instances]
    return instances, trainer


def share_cores(cores: Sequence[int], claims: Sequence[Claim], *, spare: bool) -> list[tuple[int, ...]]:
    """Neighbouring cores for every claim, in proportion to its weight; the last claim also gets the remainder.

    Args:
        spare: every process gets one core more than its workers, for its other work: an HTTP server and a scheduler, or
            the producer and the rewards.

    Returns:
        Empty tuples if there are too few cores to separate the processes; claims with a fixed core may share cores.
    """
    fixed = [claim for claim in claims if claim.fixed_core]
    others = [claim for claim in claims if not claim.fixed_core]
    if fixed:
        # At least one core is left for each of the others.
        num_shared = min(len(fixed), len(cores) - len(others))
        if num_shared < 1 or len(cores) < 2:
            return [()] * len(claims)
        rest = iter(share_cores(cores[num_shared:], others, spare=spare) if others else [])
        ones = iter((cores[i % num_shared],) for i in range(len(fixed)))
        return [next(ones) if claim.fixed_core else next(rest) for claim in claims]
    weights = [claim.workers + spare for claim in others]
    least = weights if spare else [1] * len(weights)
    return _split(cores, least, weights) if len(cores) >= sum(least) else [()] * len(claims)


def _split(cores: Sequence[int], least: Sequence[int], weights: Sequence[int]) -> list[tuple[int, ...]]:
    """Runs of `cores`: each claim gets at least its `least`, and a share of the rest in proportion to its weight."""
    total, free = sum(weights), len(cores) - sum(least)
    ends = [first + free * part // total for first, part in zip(accumulate(least), accumulate(weights), strict=True)]
    return [tuple(cores[start:end]) for start, end in pairwise([0, *ends])]


def _threads(claim: Claim, cores: tuple[int, ...]) -> int:
    """Threads of each worker so that each thread, and the process's other work, has its own core.

    Two threads that wait for each other on one busy core are many times slower than one.
    """
    if claim.fixed_core:
        return 1
    return max(1, min(MAX_THREADS, (len(cores) - 1) // claim.workers))


def _share_devices(
    config: Config, claims: Sequence[Claim], machine: Machine, with_trainer: bool
) -> list[tuple[str, ...]]:
    """Neighbouring devices for every claim, one per worker, the widest first.

    So blocks of 2, 4 or 8 begin at a multiple of their size, within directly connected devices. Unless `run.placement`
    is "separate", instances and training ranks are given the same devices.
    """
    given: dict[int, tuple[str, ...]] = {}
    shared = with_trainer and config.run.placement != "separate"
    # Instances that share the devices of the ranks begin again at the first one.
    pools = [claims[:-1], claims[-1:]] if shared else [claims]
    needed = num_devices(config, with_trainer=with_trainer)
    if needed > len(machine.devices):
        raise _too_few(config, machine, needed, with_trainer)
    start = 0
    for pool in pools:
        left = list(machine.devices)
        for i in sorted(range(len(pool)), key=lambda i: -pool[i].workers):
            given[start + i], left = tuple(left[: pool[i].workers]), left[pool[i].workers :]
        start += len(pool)
    return [given[i] for i in range(len(claims))]


def num_devices(config: Config, *, with_trainer: bool = True) -> int:
    """How many devices a run needs whose processes are all on this machine."""
    pools = _pools(config, with_trainer)
    return sum(pools) if config.run.placement == "separate" else max(pools)


def _pools(config: Config, with_trainer: bool) -> tuple[int, int]:
    """The devices of all training ranks, and those of all instances."""
    instances = config.inference.num_instances * config.inference.tensor_parallel
    return config.trainer.num_local_ranks if with_trainer else 0, instances


def remedy_for_too_few(config: Config, devices: Sequence[str], *, with_trainer: bool = True) -> str:
    """What to do where only these devices can be used, and a run needs more."""
    kind = config.trainer.device
    if not devices:
        tool = "nvidia-smi" if kind == "cuda" else "npu-smi info"
        return f"check `{tool}` and {VISIBLE[kind]}, or set trainer.device to 'cpu'"
    remedy = (
        f"let {VISIBLE[kind]} name more, ask for fewer, or start the instances on another host and name them in "
        "pool.instances (torchrun -m async_rl.trainer)"
    )
    has_room = max(_pools(config, with_trainer)) <= len(devices)
    if has_room and with_trainer and config.run.placement == "separate":
        return (
            f"set run.placement to 'shared' or 'turns', for both pools on one device (docs/placement.md), or {remedy}"
        )
    return remedy


def _too_few(config: Config, machine: Machine, needed: int, with_trainer: bool) -> ConfigError:
    kind, inference, trainer = config.trainer.device, config.inference, config.trainer
    sign = " for each pool, " if config.run.placement != "separate" else " + "
    ranks = f"trainer.num_processes = {trainer.num_local_ranks}{sign}" if with_trainer else ""
    have = f"{len(machine.devices)} ({', '.join(machine.devices)})" if machine.devices else "none"
    instances = f"inference.num_instances = {inference.num_instances} x "
    instances += f"inference.tensor_parallel = {inference.tensor_parallel}"
    return ConfigError(
        f"trainer.device is {kind!r}, and this run needs {needed} devices: {ranks}{instances}; there are {have}: "
        + remedy_for_too_few(config, machine.devices, with_trainer=with_trainer)
    )
