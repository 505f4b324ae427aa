"""Accelerators and their drivers, without importing torch."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.programs.cuda_driver import OTHER_BUILD, is_too_old, needed_driver
from deploy.doctor.finding import Finding
from deploy.local.machine import VISIBLE, Run, find_devices, output_of
from deploy.local.machine_shares import num_devices, remedy_for_too_few
from deploy.local.torch_build import cuda_of_torch, installed, why_unfit

GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"]


def find_device_facts(
    config: Config | None, environment: Mapping[str, str], run: Run = output_of, dev: Path = Path("/dev")
) -> Iterator[Finding]:
    """The devices there are; with a config whether they are those that it needs."""
    gpus = [line.strip() for line in run(GPU_QUERY).splitlines() if line.count(",") >= GPU_QUERY[1].count(",")]
    npus = sorted(path.name for path in dev.glob("davinci[0-9]*"))
    yield from (Finding(f"gpu {line.partition(',')[0]}", "note", line.partition(",")[2].strip()) for line in gpus)
    yield from (Finding(name, "note", "an Ascend NPU") for name in npus)
    if not gpus and not npus:
        yield Finding("devices", "note", "none: runs use CPUs here (trainer.device = 'cpu')")
    if gpus:
        yield from _torch_build("cuda", config)
    if shutil.which("npu-smi") or installed("torch-npu"):
        yield from _torch_build("npu", config)
    if gpus and (cuda := cuda_of_torch()) is not None:
        yield from _driver(gpus[0].split(",")[-3].strip(), cuda)
    for variable in VISIBLE.values():
        if variable in environment:
            yield Finding(variable, "note", environment[variable] or "empty: no device is visible")
    if config is not None and config.trainer.device != "cpu":
        yield _enough(config, environment, run, dev)


def _driver(driver: str, cuda: str) -> Iterator[Finding]:
    if is_too_old(driver, cuda):
        text = f"{driver}, but torch {installed('torch')} is built for CUDA {cuda}, which needs {needed_driver(cuda)}"
        yield Finding("driver", "warning", f"{text} or newer: torch sees no GPU", OTHER_BUILD)


def _torch_build(kind: str, config: Config | None) -> Iterator[Finding]:
    if (unfit := why_unfit(kind)) is not None:
        is_needed = config is None or config.trainer.device == kind
        yield Finding("torch build", "fault" if is_needed else "note", *unfit)


def _enough(config: Config, environment: Mapping[str, str], run: Run, dev: Path) -> Finding:
    kind = config.trainer.device
    # On a cluster the launcher gives instances hosts of their own.
    is_alone = config.pool.instances or config.cluster.training_nodes > 1
    needed = config.trainer.num_local_ranks if is_alone else num_devices(config)
    try:
        devices = find_devices(kind, environment, run, dev)
    except ConfigError as error:
        return Finding("devices", "fault", str(error))
    text = f"{len(devices)} {kind} devices usable, {needed} needed here"
    if len(devices) >= needed:
        return Finding("devices", "ok", text)
    return Finding("devices", "fault", text, remedy_for_too_few(config, devices, with_trainer=not is_alone))
