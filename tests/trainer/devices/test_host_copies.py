"""Copies to an accelerator start in pinned memory and do not wait; copies from it are one."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.devices.host_copies import to_device, to_host


class Copies(TorchFunctionMode):
    """Records copies to an accelerator, which there need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.copied: list[tuple[torch.Tensor, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is torch.Tensor.to:
            self.copied.append((args[0], kwargs))
        return func(*args, **(kwargs or {}))


def test_a_tensor_is_pinned_before_it_is_copied_without_waiting() -> None:
    with Copies() as copies:
        made = to_device(torch.arange(3), torch.device("meta"))
    ((source, options),) = copies.copied
    assert made.device.type == "meta"
    assert source is copies.pinned[0] and options == {"non_blocking": True}


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


def test_tensors_come_back_one_by_one() -> None:
    assert to_host([]) == []
    first, second = to_host([torch.tensor(1.5, requires_grad=True), torch.tensor([[2.0, 3.0]])])
    assert (first.tolist(), second.tolist()) == ([1.5], [2.0, 3.0])
