"""One rank of layouts under `trainer/devices/cuda.py`, whose GPU is an emulated NPU.

torch gives no other device the name cuda. Calls of `torch.cuda` go to the NPU, and FlashAttention is `FakeFlash`.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.support.devices.emulated import mindspeed
from tests.support.devices.emulated.torch_npu import on_host
from tests.support.devices.fake_flash import FakeFlash

FLASH = ("_flash_attention_forward", "_flash_attention_backward")

if __name__ == "__main__":
    mindspeed.adapt()
    library = torch.library.Library("aten", "IMPL")
    operators: tuple[Callable[..., Any], ...] = (FakeFlash().forward, FakeFlash().backward)
    for name, operator in zip(FLASH, operators, strict=True):
        library.impl(name, on_host(name, operator), "PrivateUse1")
    cuda: Any = import_module("trainer.devices.cuda")
    cuda.DEVICE, cuda.BACKEND = torch.device("npu", cuda.DEVICE.index), "hccl"
    cuda.MODEL_OPTIONS["bias_activation_fusion"] = True
    cuda.prepare()
    import_module("tests.support.trainer.layout_worker").main(Path(sys.argv[1]), Path(sys.argv[2]), cuda)
