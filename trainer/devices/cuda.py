"""Megatron-core on NVIDIA GPUs, with Transformer Engine and Apex if they are installed.

Importing this module touches no driver; `prepare` does.
"""

import shutil
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from async_rl.errors import ConfigError
from trainer.devices.cuda_attention import CUDAAttention
from trainer.devices.layer_ops import LayerOps

BACKEND = "nccl"
# torchrun's LOCAL_RANK; 0 for a process not started by torchrun.
DEVICE = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def _has_compiler() -> bool:
    """Whether torch.compile can build GPU kernels here: Triton builds its launchers with the host's C compiler."""
    return find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


MODEL_OPTIONS: dict[str, Any] = {
    # Megatron's fused SwiGLU uses torch.compile.
    "bias_activation_fusion": _has_compiler(),
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
        build = torch.version.cuda or "none"
        raise ConfigError(
            f"trainer.device is 'cuda' but torch sees no CUDA device: torch {torch.__version__} is built for CUDA "
            f"{build}; install a CUDA build of torch and check that `nvidia-smi` lists a GPU, or set trainer.device "
            "to 'cpu'"
        )
    num_devices = torch.cuda.device_count()
    if DEVICE.index >= num_devices:
        raise ConfigError(
            f"trainer.device is 'cuda' and this is local rank {DEVICE.index}, but torch sees {num_devices} CUDA "
            f"device(s): start at most {num_devices} rank(s) on this host, or let CUDA_VISIBLE_DEVICES name more"
        )
    torch.cuda.set_device(DEVICE)
