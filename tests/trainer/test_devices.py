"""Choosing a device, and what the CPU's substitutions leave alone."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch

from async_rl.errors import ConfigError
from trainer.devices import DEVICE_NAMES, choose_device


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device is 'tpu': expected one of cpu"):
        choose_device("tpu")


@pytest.mark.parametrize("name", DEVICE_NAMES)
def test_every_device_module_loads_without_its_device_and_offers_the_same(name: str) -> None:
    device = import_module(f"trainer.devices.{name}")
    assert {"BACKEND", "MODEL_OPTIONS", "ATTENTION", "LAYER_OPS", "prepare"} <= set(vars(device))
    # torch knows the name of an NPU only where torch_npu is; the others can be asked anywhere.
    if name != "npu":
        assert device.DEVICE.type == name


@pytest.mark.distributed
def test_choosing_an_accelerator_does_not_load_megatron() -> None:
    # MindSpeed has to come before it.
    program = (
        "import sys, trainer.devices.npu, trainer.devices.cuda\n"
        "sys.exit(', '.join(name for name in sys.modules if name.startswith('megatron')))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert answer.stderr.strip() == ""


def test_cpu_stands_in_for_cuda_in_megatron_only() -> None:
    factory, current_device = torch.zeros, torch.cuda.current_device
    assert choose_device("cpu") is choose_device("cpu")
    assert torch.zeros is factory
    assert torch.cuda.current_device is current_device
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
