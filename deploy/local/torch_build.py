"""Whether the installed torch can use the devices of a kind, by its packages: nothing here imports it."""

import re
from importlib import metadata
from pathlib import Path

from async_rl.errors import ConfigError

OTHER_INDEX = "pip install torch of the index for your driver's CUDA: https://pytorch.org/get-started/locally"


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch is built for, by its own file; None for none."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (metadata.PackageNotFoundError, OSError):
        return None
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, flags=re.MULTILINE)
    return match[1] if match else None


def why_unfit(kind: str) -> tuple[str, str] | None:
    """Why the installed torch sees no device of a kind, and the remedy; None if it may, or is not installed."""
    torch = installed("torch")
    if torch is None or kind == "cpu":
        return None
    if kind == "cuda":
        is_for_cpus = cuda_of_torch() is None and "+rocm" not in torch
        return (f"torch {torch} is built for CPUs, and there are GPUs", OTHER_INDEX) if is_for_cpus else None
    own, npu = torch.split("+")[0], installed("torch-npu")
    if npu is None:
        return f"there are NPUs, and no torch_npu for torch {own}", f"pip install torch-npu=={own}"
    if npu.split("+")[0].split(".post")[0] != own:
        return f"torch {own} and torch_npu {npu} are no pair", f"pip install torch-npu=={own}"
    return None


def require_torch_for(kind: str) -> None:
    """Checks that the trainer's torch is one for its devices, of which there are some.

    Raises:
        ConfigError: it is not.
    """
    if (unfit := why_unfit(kind)) is not None:
        found, remedy = unfit
        raise ConfigError(f"trainer.device is {kind!r}, and the trainer would see none: {found}; {remedy}")
