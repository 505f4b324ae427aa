"""Whether an NVIDIA driver is new enough for a CUDA build of torch; asks neither the driver's library nor torch."""

import re
import subprocess

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By major version of CUDA; NVIDIA's release notes of the CUDA toolkit, table of minor version compatibility."""

TIMEOUT_S = 60.0
"""nvidia-smi may have to initialize the driver."""

OTHER_BUILD = (
    "install a newer driver, or a build of torch for an older CUDA: `pip install torch --index-url "
    "https://download.pytorch.org/whl/cu126`; for others see https://pytorch.org/get-started/locally"
)


def needed_driver(cuda: str) -> int | None:
    """The oldest major version of a driver for torch of this CUDA version ("13.0"); None if it is unknown."""
    return OLDEST_DRIVER.get(_major(cuda))


def is_too_old(driver: str, cuda: str) -> bool:
    """Whether a driver ("550.54.15") is too old for torch of this CUDA version; False where either is unknown."""
    needed = needed_driver(cuda)
    return needed is not None and 0 < _major(driver) < needed


def driver_version() -> str | None:
    """The driver's version, by nvidia-smi; None if it does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines and _major(lines[0]) else None


def _major(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match[0]) if match else 0
