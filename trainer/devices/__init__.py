"""Chooses the device module by its name in the config; all that differs between devices is in these modules."""

from importlib import import_module
from typing import Any, Protocol, cast

import torch

from async_rl.errors import ConfigError

DEVICE_NAMES = ("cpu",)


class Device(Protocol):
    """What a device module offers."""

    BACKEND: str
    """torch.distributed backend of the training ranks."""
    DEVICE: torch.device
    """Where parameters and micro-batches live."""
    MODEL_OPTIONS: dict[str, Any]
    """TransformerConfig fields that this device asks for."""

    def prepare(self) -> None:
        """Makes Megatron usable on this device; called once or more, before any Megatron object is made."""
        ...


def choose_device(name: str) -> Device:
    """The prepared device module called `name`.

    Raises:
        ConfigError: there is no such device.
    """
    if name not in DEVICE_NAMES:
        raise ConfigError(f"trainer.device is {name!r}: expected one of {', '.join(DEVICE_NAMES)}")
    device = cast(Device, import_module(f"trainer.devices.{name}"))
    device.prepare()
    return device
