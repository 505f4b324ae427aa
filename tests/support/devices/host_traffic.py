"""Counts on a CPU what would hold up an accelerator: waits for the device, blocking copies, and kernels.

Inside `HostTraffic` a tensor counts as on the device if it was uploaded, is among the given ones, or was computed from
such tensors; all others are in host memory. So it follows the real program, with the values that it really computes.
What cannot be seen here is a kernel that waits by itself.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

READS = {
    getattr(torch.Tensor, name)
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
}
"""Methods that bring values to the host."""

FACTORIES = {
    getattr(torch, name)
    for name in ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "from_numpy")
}
"""Without a device they make tensors in host memory."""

FROM_VALUES = {torch.tensor, torch.as_tensor}
"""Given a device, they copy from memory that is not pinned."""

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten.bincount,
    aten.unique_dim,
    aten._unique,
    aten._unique2,
    aten.unique_consecutive,
}
"""Operators that wait for the device: their result's size, or a value, is needed on the host."""

INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""With a mask in place of indices, they wait for the number of its elements."""


WITHOUT_KERNEL = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten._unsafe_view}
"""They only reserve memory, or describe it."""


class HostTraffic:
    """What happened between the host and the device inside the context of `watch`, each with the code that did it."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        """The host waited for the device."""
        self.blocking_copies: list[str] = []
        """From host memory that is not pinned, which waits for the copy."""
        self.uploads: list[str] = []
        """Copies to the device that do not wait."""
        self.mixed: list[str] = []
        """Operators given tensors on both sides, which fail on a device."""
        self.kernels: list[str] = []
        """Operators that computed something on the device."""
        self._on_device: dict[int, Any] = {}
        self._makes_on_host = False
        self._is_watching = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._is_watching = True
        try:
            with _Functions(self), _Operators(self):
                yield
        finally:
            self._is_watching = False

    def put_on_device(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # Kept, so that no other tensor gets its address.
            self._on_device[storage._cdata] = storage

    def as_kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as one operator of the device: what it does inside is not watched."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._is_watching:
                return function(*args, **kwargs)
            given = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
            if not all(map(self.is_on_device, given)):
                self.mixed.append(f"{function.__name__} at {_caller()}")
            self.kernels.append(function.__name__)
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                made = function(*args, **kwargs)
            self.put_on_device(x for x in tree_iter(made) if isinstance(x, torch.Tensor))
            return made

        return run

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_device

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of torch from Python."""
        name = getattr(function, "__name__", str(function))
        if function in READS:
            if not self.is_on_device(args[0]):
                return function(*args, **kwargs)
            self.waits.append(f"{name} at {_caller()}")
            with _disable_current_modes():
                read = function(*args, **kwargs)
                return read.clone() if isinstance(read, torch.Tensor) else read
        if function is torch.Tensor.to and _names_device(args[1:], kwargs) and not self.is_on_device(args[0]):
            (self.uploads if kwargs.get("non_blocking") else self.blocking_copies).append(f"to at {_caller()}")
            uploaded = function(*args, **kwargs).clone()
            self.put_on_device([uploaded])
            return uploaded
        if function in FACTORIES:
            on_host = kwargs.get("device") is None
            if function in FROM_VALUES and not on_host:
                self.blocking_copies.append(f"{name} at {_caller()}")
            before, self._makes_on_host = self._makes_on_host, on_host
            try:
                return function(*args, **kwargs)
            finally:
                self._makes_on_host = before
        counts = args[1] if function is torch.Tensor.repeat_interleave else None
        if isinstance(counts, torch.Tensor) and self.is_on_device(counts) and kwargs.get("output_size") is None:
            self.waits.append(f"{name} at {_caller()}")
        return function(*args, **kwargs)

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """An operator on tensors, also of a backward pass."""
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = [tensor for tensor in tensors if self.is_on_device(tensor)]
        packet = operator.overloadpacket
        if on_device and len(on_device) < len(tensors):
            on_host = [tensor for tensor in tensors if not self.is_on_device(tensor) and tensor.dim()]
            if packet in (aten.copy_, aten._to_copy):
                blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                (self.blocking_copies if blocking else self.uploads).append(f"{operator} at {_caller()}")
            elif on_host:
                self.mixed.append(f"{operator} at {_caller()}")
        if on_device:
            is_masked = packet in INDEXING and any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
            )
            if packet in WAITING or is_masked:
                self.waits.append(f"{operator} at {_caller()}")
        result = operator(*args, **kwargs)
        if on_device or (not tensors and not self._makes_on_host):
            self.put_on_device(x for x in tree_iter(result) if isinstance(x, torch.Tensor))
            if not operator.is_view and packet not in WITHOUT_KERNEL:
                self.kernels.append(str(operator))
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, traffic: HostTraffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._traffic.call(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, traffic: HostTraffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._traffic.run(func, args, kwargs or {})


def _names_device(args: Any, kwargs: Any) -> bool:
    return any(isinstance(x, (torch.device, str)) for x in (*args, kwargs.get("device")))


def _caller() -> str:
    """The innermost code outside torch and of this file."""
    frames = traceback.extract_stack(sys._getframe(2))
    named = [frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__]
    return f"{named[-1].filename}:{named[-1].lineno}" if named else "nowhere"
