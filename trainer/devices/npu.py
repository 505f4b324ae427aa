"""Megatron-core on Ascend NPUs, through torch_npu and MindSpeed.

Neither is imported before `prepare`, which must run before Megatron is imported: MindSpeed replaces names in Megatron's
modules as they are loaded, and redirects their calls of `torch.cuda` to the NPU (branch core_r0.16.0 of
Ascend/MindSpeed, mindspeed/megatron_adaptor.py).
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from async_rl.errors import ConfigError
from trainer.devices.layer_ops import LayerOps
from trainer.devices.npu_attention import NPUAttention
from trainer.devices.npu_ops import NPUOps

BACKEND = "hccl"
_LOCAL_RANK = dist.get_node_local_rank(fallback_rank=0)

MODEL_OPTIONS: dict[str, Any] = {
    # Both are CUDA kernels. Set although they are Megatron's defaults: MindSpeed fills in options that are not set.
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
}

ATTENTION = NPUAttention()

_OPS = NPUOps()
LAYER_OPS = LayerOps(rms_norm=_OPS.rms_norm, rotary=_OPS.rotary, swiglu=_OPS.swiglu, grouped_linear=_OPS.grouped_linear)

MEGATRON_SERIES = "0.16"
"""The megatron-core series that MindSpeed's branch core_r0.16.0 patches."""


PACKAGES = {"triton": "triton-ascend (`pip install triton-ascend==3.2.0`)"}
"""What to install for a module that MindSpeed imports, where the names differ."""


def __getattr__(name: str) -> Any:
    if name == "DEVICE":
        # torch accepts this device type only after torch_npu is imported.
        return torch.device("npu", _LOCAL_RANK)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def prepare() -> None:
    """Loads torch_npu and MindSpeed and makes this rank's NPU the current device; later calls do nothing.

    Raises:
        ConfigError: a package is missing or its version does not fit the others, or there is no NPU for this rank.
    """
    require_versions()
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "megatron")
    assert not loaded, f"{loaded[0]} was imported before the NPU was prepared: choose the device before that import"
    torch_npu = _import("torch_npu", "load CANN's set_env.sh first, so that its libraries are found")
    num_devices = torch_npu.npu.device_count()
    if num_devices <= _LOCAL_RANK:
        raise ConfigError(
            f"trainer.device is 'npu' and this is local rank {_LOCAL_RANK}, but torch_npu sees {num_devices} NPU(s): "
            "check `npu-smi info`, ASCEND_RT_VISIBLE_DEVICES and the number of ranks on this host"
        )
    torch_npu.npu.set_device(_LOCAL_RANK)
    with bare_arguments():
        _import("mindspeed.megatron_adaptor", "install branch core_r0.16.0 of Ascend/MindSpeed from its source")


def require_versions() -> None:
    """Checks the versions of the installed packages without importing them.

    Raises:
        ConfigError: torch and torch_npu are not a pair, or megatron-core is not the version that MindSpeed supports.
    """
    torch_npu = _installed("torch-npu")
    torch_version = torch.__version__.split("+")[0]
    if torch_npu.split("+")[0].split(".post")[0] != torch_version:
        raise ConfigError(
            f"torch {torch_version} and torch_npu {torch_npu} are not a pair: install the torch_npu of the same version"
        )
    megatron = _installed("megatron-core")
    if not megatron.startswith(f"{MEGATRON_SERIES}."):
        raise ConfigError(
            f"megatron-core is {megatron}, but MindSpeed's branch core_r0.16.0 is for {MEGATRON_SERIES}: install "
            "megatron-core 0.16.1"
        )


@contextmanager
def bare_arguments() -> Iterator[None]:
    """Hides the command line: MindSpeed parses it on import and would put our options into Megatron's config."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"trainer.device is 'npu' but {package} is not installed: see docs/devices.md for the versions that belong "
            "together, or set trainer.device to 'cpu'"
        ) from None


def _import(module: str, remedy: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        lacking = (error.name or module).split(".")[0]
        if lacking == module.split(".")[0]:
            raise ConfigError(f"trainer.device is 'npu' but there is no module {error.name}: {remedy}") from error
        package = PACKAGES.get(lacking, f"the package that has {lacking}")
        raise ConfigError(
            f"trainer.device is 'npu' but {module} cannot be imported, since it imports {error.name!r}, which is not "
            f"installed: install {package}; see docs/devices.md"
        ) from error
    except (ImportError, OSError) as error:
        raise ConfigError(f"trainer.device is 'npu' but {module} cannot be imported ({error}): {remedy}") from error
