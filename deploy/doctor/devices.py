"""Accelerators and their drivers, without importing torch."""

import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.programs.cuda_driver import OTHER_BUILD, is_too_old, needed_driver
from deploy.doctor.finding import Finding
from deploy.doctor.versions import installed
from deploy.local.machine import VISIBLE, Run, find_devices, output_of
from deploy.local.machine_shares import num_devices, remedy_for_too_few

GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,memory.used", "--format=csv,noheader"]


def find_device_facts(
    config: Config | None, environment: Mapping[str, str], run: Run = output_of, dev: Path = Path("/dev")
) -> Iterator[Finding]:
    """The devices there are; with a config whether they are those that it needs."""
    gpus = [line.strip() for line in run(GPU_QUERY).splitlines() if line.strip()]
    npus = sorted(path.name for path in dev.glob("davinci[0-9]*"))
    yield from (Finding(f"gpu {line.partition(',')[0]}", "note", line.partition(",")[2].strip()) for line in gpus)
    yield from (Finding(name, "note", "an Ascend NPU") for name in npus)
    if not gpus and not npus:
        yield Finding("devices", "note", "none: runs use CPUs here (trainer.device = 'cpu')")
    yield from _torch_build(bool(gpus))
    if gpus and (cuda := cuda_of_torch()) is not None:
        yield from _driver(gpus[0].split(",")[-3].strip(), cuda)
    for variable in VISIBLE.values():
        if variable in environment:
            yield Finding(variable, "note", environment[variable] or "empty: no device is visible")
    if config is not None and config.trainer.device != "cpu":
        yield _enough(config, environment, run, dev)


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch is built for, by its own file; None for none."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, flags=re.MULTILINE)
    return match[1] if match else None


def _driver(driver: str, cuda: str) -> Iterator[Finding]:
    if is_too_old(driver, cuda):
        text = f"{driver}, but torch {installed('torch')} is built for CUDA {cuda}, which needs {needed_driver(cuda)}"
        yield Finding("driver", "warning", f"{text} or newer: torch sees no GPU", OTHER_BUILD)


def _torch_build(has_gpu: bool) -> Iterator[Finding]:
    version = installed("torch")
    if has_gpu and version is not None and version.endswith("+cpu"):
        yield Finding(
            "torch build",
            "fault",
            f"{version} is built for CPUs, and there are GPUs",
            "pip install torch of the index for your driver's CUDA: https://pytorch.org/get-started/locally",
        )
    npu = installed("torch-npu")
    # By their packages: an `import torch` would load torch_npu, too.
    if npu is not None and version is not None and npu.split(".post")[0] != (own := version.split("+")[0]):
        yield Finding(
            "torch build", "fault", f"torch {own} and torch_npu {npu} are no pair", f"pip install torch-npu=={own}"
        )
    if npu is None and shutil.which("npu-smi"):
        yield Finding("torch build", "fault", "npu-smi is here and torch_npu is not", "pip install torch-npu")


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
