"""Choosing a device, and what the CPU's substitutions leave alone."""

import pytest
import torch

from async_rl.errors import ConfigError
from trainer.devices import choose_device


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device is 'tpu': expected one of cpu"):
        choose_device("tpu")


def test_cpu_stands_in_for_cuda_in_megatron_only() -> None:
    factory, current_device = torch.zeros, torch.cuda.current_device
    assert choose_device("cpu") is choose_device("cpu")
    assert torch.zeros is factory
    assert torch.cuda.current_device is current_device
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"
