"""Megatron-core on NVIDIA GPUs, with Transformer Engine and Apex if they are installed.

Importing this module touches no driver; `prepare` does.
"""

import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from async_rl.errors import ConfigError
from async_rl.shared.programs.cuda_driver import OTHER_BUILD, driver_version, is_too_old, needed_driver
from trainer.devices.cuda_attention import CUDAAttention
from trainer.devices.layer_ops import LayerOps

BACKEND = "nccl"
# torchrun's LOCAL_RANK; 0 for a process not started by torchrun.
DEVICE = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def has_compiler() -> bool:
    """Whether torch.compile can build GPU kernels here: Triton builds its launchers with the host's C compiler, against
    Python's own headers, which Linux distributions package apart (python3.11-dev)."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    return find_spec("triton") is not None and has_headers and any(map(shutil.which, ("cc", "gcc", "clang")))


MODEL_OPTIONS: dict[str, Any] = {
    # Megatron's fused SwiGLU uses torch.compile.
    "bias_activation_fusion": has_compiler(),
    # Weight gradients are added to Megatron's fp32 buffers by an extension that is part of Apex.
    "gradient_accumulation_fusion": find_spec("fused_weight_gradient_mlp_cuda") is not None,
    # Waits for the device after each exchange between pipeline stages, for old versions of PyTorch.
    "batch_p2p_sync": False,
}

ATTENTION = CUDAAttention()
LAYER_OPS = LayerOps()


def prepare() -> None:
    """Makes this rank's GPU the current device.

    Raises:
        ConfigError: there is no GPU, or no GPU for this rank.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.device is 'cuda' but torch sees no CUDA device: {_why_no_device()}")
    num_devices = torch.cuda.device_count()
    if DEVICE.index >= num_devices:
        raise ConfigError(
            f"trainer.device is 'cuda' and this is local rank {DEVICE.index}, but torch sees {num_devices} CUDA "
            f"device(s): start at most {num_devices} rank(s) on this host, or let CUDA_VISIBLE_DEVICES name more"
        )
    torch.cuda.set_device(DEVICE)


def _why_no_device() -> str:
    """The likely cause and its remedy."""
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"torch {torch.__version__} is no CUDA build; install one and check that `nvidia-smi` lists a GPU, or set "
            "trainer.device to 'cpu'"
        )
    build = f"torch {torch.__version__} is built for CUDA {cuda}"
    driver = driver_version()
    if driver is None:
        return (
            f"{build}, and nvidia-smi names no driver; check that `nvidia-smi` lists a GPU, also inside a container, "
            "or set trainer.device to 'cpu'"
        )
    needed = needed_driver(cuda)
    needs = f", which needs a driver of version {needed} or newer" if needed is not None else ""
    if is_too_old(driver, cuda):
        return f"{build}{needs}, and the driver is {driver}: {OTHER_BUILD}"
    return (
        f"{build}{needs}; the driver is {driver}: check CUDA_VISIBLE_DEVICES, and that this user may open /dev/nvidia*"
    )
