"""Cores, memory, disk, shared memory and limits of this host."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_rl.checks.forecast.run_forecast import RunForecast
from async_rl.config.sections import Config
from deploy.doctor.finding import Finding, State
from deploy.local.machine import own_cores
from deploy.local.machine_memory import MIB, HostMemory
from deploy.local.memory_fit import GIB, host_bytes

SHARED_MEMORY = Path("/dev/shm")

LEAST_SHARED_BYTES = 512 * MIB
"""nccl and gloo put the buffers of ranks on one host there; a container has 64 MiB by default."""

LEAST_DISK_BYTES = 5 * GIB

LEAST_OPEN_FILES = 1024
"""Of any process of a run: its libraries, logs, records and connections to a few instances."""

FILES_PER_GROUP = 2
"""Connections of a group under way: to its instance, and to its reward's process or service."""

MOMENTS_BYTES = 12
"""A checkpoint has master weights and both moments of each parameter, in float32, beside the weights."""


def find_host_facts(
    config: Config | None,
    forecast: RunForecast | None,
    memory: HostMemory,
    shared_memory: Path = SHARED_MEMORY,
) -> Iterator[Finding]:
    """`forecast` is that of `config`, if its model is known."""
    yield Finding("cores", "note", f"{len(own_cores()) or os.cpu_count()} for this process")
    yield _memory(config, forecast, memory)
    yield _disk(config, forecast)
    yield from _shared_memory(shared_memory)
    yield _open_files(config)


def _memory(config: Config | None, forecast: RunForecast | None, memory: HostMemory) -> Finding:
    found = f"{memory.available_bytes / GIB:.1f} GiB free of {memory.total_bytes / GIB:.1f} GiB"
    if config is not None and forecast is not None:
        needed = host_bytes(config, forecast)
        found += f"; the run needs about {needed / GIB:.1f} GiB"
        if needed > memory.available_bytes:
            state: State = "fault" if needed > memory.total_bytes else "warning"
            return Finding("memory", state, found, "end other programs, or see async-rl check for what takes it")
    return Finding("memory", "ok", found)


def _disk(config: Config | None, forecast: RunForecast | None) -> Finding:
    """The file system of run.dir: room for the checkpoints that are kept, and one more while it is written."""
    directory = (config.run.dir if config is not None else Path.cwd()).absolute()
    existing = next(parent for parent in (directory, *directory.parents) if _is_directory(parent))
    free = shutil.disk_usage(existing).free
    needed = LEAST_DISK_BYTES
    if config is not None and forecast is not None:
        copies = config.checkpoint.keep + 1 if config.checkpoint.every else 0
        each = forecast.publish_bytes + MOMENTS_BYTES * forecast.model.num_parameters
        needed = max(64 * MIB, copies * each)
    found = f"{free / GIB:.1f} GiB free at {existing}, about {needed / GIB:.1f} GiB wanted"
    if free < needed:
        return Finding("disk", "warning", found, "set run.dir to a larger disk, or lower checkpoint.keep")
    return Finding("disk", "ok", found)


def _is_directory(path: Path) -> bool:
    """False also where that may not be known."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _shared_memory(path: Path) -> Iterator[Finding]:
    if not path.is_dir():
        return
    usage = shutil.disk_usage(path)
    found = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB at {path}"
    if usage.total < LEAST_SHARED_BYTES:
        remedy = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)"
    else:
        remedy = f"remove what ended programs have left: ls -l {path}"
    if usage.free < LEAST_SHARED_BYTES:
        yield Finding("shared memory", "fault" if usage.free < MIB else "warning", found, remedy)
    else:
        yield Finding("shared memory", "ok", found)


def _open_files(config: Config | None) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = LEAST_OPEN_FILES
    if config is not None:
        under_way = max(config.prompts.num_drawn, config.rollout.options.max_concurrent)
        needed += FILES_PER_GROUP * under_way
    unlimited = resource.RLIM_INFINITY
    found = f"{'unlimited' if soft == unlimited else soft}, {needed} wanted"
    if soft == unlimited or soft >= needed:
        return Finding("open files", "ok", found)
    remedy = f"ulimit -n {needed}"
    if hard != unlimited and hard < needed:
        remedy = f"as root: add '* - nofile {needed}' to /etc/security/limits.conf, log in again; then {remedy}"
    return Finding("open files", "warning", found, remedy)
