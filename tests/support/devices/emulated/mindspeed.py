"""Stands in for `mindspeed.megatron_adaptor` and, in it, for `torch_npu.contrib.transfer_to_npu`.

Megatron's calls of `torch.cuda` go to the NPU, "cuda" is "npu" in the functions that make tensors, and
`torch.compile` leaves functions as they are. MindSpeed's fused operations are not here: the trainer enables none.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "zeros_like",
    "ones_like",
)


def _of_npu(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("npu", value)
    if isinstance(value, (str, torch.device)) and str(value).startswith("cuda"):
        return torch.device(str(value).replace("cuda", "npu", 1))
    return value


def _with_npu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _of_npu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _to(tensor_or_module: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = [_of_npu(value) if isinstance(value, (str, torch.device)) else value for value in args[:1]]
    return function(tensor_or_module, *first, *args[1:], **kwargs)


def _not_compiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    return (lambda inner: inner) if function is None else function


def transfer_to_npu() -> None:
    npu = torch.get_device_module("npu")
    for module in (torch.cuda, torch.cuda.random):
        for name, value in vars(npu).items():
            if not name.startswith("__") and hasattr(module, name):
                setattr(module, name, value)
    torch.Tensor.is_cuda = torch.Tensor.is_npu  # type: ignore[attr-defined]
    # Before they are wrapped: it lists the functions that a context of a device changes.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _with_npu(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        move = kind.to
        kind.to = functools.partialmethod(_to, move)  # type: ignore[assignment, method-assign]
        kind.cuda = lambda self, device=None, **_: self.to(_of_npu("cuda" if device is None else device))  # type: ignore[method-assign]
    for name in ("init_process_group", "new_group"):
        setattr(dist, name, _with_hccl(getattr(dist, name)))


def _with_hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(backend := kwargs.get("backend"), str):
            kwargs["backend"] = backend.replace("nccl", "hccl")
        return function(*args, **kwargs)

    return call


def adapt() -> None:
    """What importing `mindspeed.megatron_adaptor` does."""
    transfer_to_npu()
    torch.compile = _not_compiled  # type: ignore[assignment]
    torch.jit.script = _not_compiled  # type: ignore[assignment]
    type_of = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        return answer.replace("torch.npu.", "torch.cuda.") if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_type  # type: ignore[assignment, method-assign]
