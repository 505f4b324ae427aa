"""Chooses the device module by its name in the config; these modules hold everything that differs between devices.

Shape legend: M query rows of one attention call, S its key / value rows, H query heads, K key / value heads, D head
dimension.
"""

from collections.abc import Hashable
from importlib import import_module
from typing import Any, Protocol, cast

import torch

from async_rl.errors import ConfigError
from trainer.devices.attention_part import Part
from trainer.devices.layer_ops import LayerOps

DEVICE_NAMES = ("cpu", "cuda", "npu")


class AttentionKernel(Protocol):
    """Flash attention over one part: packed sequences, causal or not; backward takes a given log-sum-exp."""

    def forward(
        self, query_MHD: torch.Tensor, key_SKD: torch.Tensor, value_SKD: torch.Tensor, part: Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [M, H, D] in the inputs' dtype, log-sum-exp of the scaled scores [H, M], float32 or wider).

        Both are new tensors that the caller may write to.
        """
        ...

    def backward(
        self,
        dout_MHD: torch.Tensor,
        query_MHD: torch.Tensor,
        key_SKD: torch.Tensor,
        value_SKD: torch.Tensor,
        out_MHD: torch.Tensor,
        lse_HM: torch.Tensor,
        part: Part,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, given output and log-sum-exp of the *whole* softmax this part belongs to.

        P_ij = exp(s_ij - lse_i) and delta_i = dout_i . out_i: with the given out and lse, not the part's own. The
        gradients are new tensors in the inputs' dtype that the caller may write to. Inputs may be views with any row
        stride.
        """
        ...


class Device(Hashable, Protocol):
    """The interface of a device module."""

    BACKEND: str
    """torch.distributed backend of tensors on this device, among training ranks and towards the instances."""
    DEVICE: torch.device
    """The device of this rank's parameters and micro-batches."""
    MODEL_OPTIONS: dict[str, Any]
    """TransformerConfig fields that this device requires."""
    LAYER_OPS: LayerOps
    """This device's kernels for the small operations of a layer."""
    ATTENTION: AttentionKernel
    """This device's flash attention; used if the check in `attention/shared_attention.py` finds it correct."""

    def prepare(self) -> None:
        """Makes Megatron usable on this device; called at least once, before any Megatron object is made."""
        ...


def choose_device(name: str, exact: bool = False) -> Device:
    """The prepared device module called `name`; with `exact`, which only the CPU has, its variant for `train.exact`.

    Raises:
        ConfigError: there is no such device.
    """
    if name not in DEVICE_NAMES:
        raise ConfigError(f"trainer.device is {name!r}: expected one of {', '.join(DEVICE_NAMES)}")
    device = cast(Device, import_module(f"trainer.devices.{name}_exact" if exact else f"trainer.devices.{name}"))
    device.prepare()
    return device
