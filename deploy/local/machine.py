"""The resources of this machine: CPU cores and accelerators. Nothing here imports torch."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError
from async_rl.shared.net.local_address import LOOPBACK

HOST = LOOPBACK

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variable with the devices that a process may use, by `trainer.device`."""

COUNT_TIMEOUT_S = 60.0
"""For `nvidia-smi`, which may have to initialize the driver, or for torch, which has to be imported."""

WITH_TORCH = {
    "cuda": "import torch; print(torch.cuda.device_count())",
    "npu": "import torch, torch_npu; print(torch_npu.npu.device_count())",
}

Run = Callable[[list[str]], str]
"""The output of a command, empty if it fails or does not exist."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` to share, empty for no pinning; `devices` as named in the kind's environment variable, empty on a CPU."""

    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()


def this_machine(kind: str) -> Machine:
    """The resources this process may use, for a run with `trainer.device` = `kind`."""
    return Machine(own_cores(), find_devices(kind, os.environ))


def own_cores() -> tuple[int, ...]:
    """CPU cores this process may use; empty if the system does not report them (macOS), which means no pinning."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def output_of(command: list[str]) -> str:
    """The output of a command; empty if it is not installed, fails, or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COUNT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_devices(
    kind: str,
    environment: Mapping[str, str],
    run: Run = output_of,
    dev: Path = Path("/dev"),
    *,
    asks_torch: bool = True,
) -> tuple[str, ...]:
    """The devices that can be assigned to processes started here; none on a CPU.

    A restriction that is set already (`CUDA_VISIBLE_DEVICES`, `ASCEND_RT_VISIBLE_DEVICES`) is kept: the devices it
    names are shared, in its order and under its names, up to the first that is none, as in CUDA. Where the driver's
    tool shows no device, torch is asked, which takes seconds; not without `asks_torch`.

    Raises:
        ConfigError: the restriction names a device twice.
    """
    if kind == "cpu":
        return ()
    listed = run(["nvidia-smi", "--list-gpus"]).splitlines() if kind == "cuda" else []
    present = _count(kind, listed, run, dev, asks_torch)
    restriction = environment.get(VISIBLE[kind])
    if restriction is None:
        return tuple(str(i) for i in range(present))
    named: dict[str, str] = {}
    for name in (part.strip() for part in restriction.split(",")):
        if (device := _device_of(name, kind, listed, present)) is None:
            break
        if device in named:
            raise ConfigError(f"{VISIBLE[kind]} is {restriction!r}, which names a device twice: name each once")
        named[device] = name
    return tuple(named.values())


def _device_of(name: str, kind: str, listed: Sequence[str], present: int) -> str | None:
    """The device of a name, the same for all of its names; None for none. `listed` are the lines of `nvidia-smi`."""
    if re.fullmatch(r"[0-9]+", name):
        return str(int(name)) if int(name) < present else None
    if kind != "cuda" or not present or not name.startswith(("GPU-", "MIG-")):
        return None
    found = [line for line in listed if f"(UUID: {name}" in line]
    if not any("(UUID: " in line for line in listed):
        return name
    if len(found) != 1:
        return None
    number = re.match(r"GPU (\d+):", found[0])
    return number[1] if number else found[0]


def _count(kind: str, listed: Sequence[str], run: Run, dev: Path, asks_torch: bool) -> int:
    """Number of devices, whatever is visible: from the driver, else from torch in a separate process."""
    if kind == "cuda":
        found = [line for line in listed if line.startswith("GPU ")]
    else:
        found = [path.name for path in dev.glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]
    if found or not asks_torch:
        return len(found)
    # Without the restriction, which renumbers the devices.
    answer = run(["env", "-u", VISIBLE[kind], sys.executable, "-c", WITH_TORCH[kind]]).strip()
    return int(answer) if answer.isdigit() else 0
