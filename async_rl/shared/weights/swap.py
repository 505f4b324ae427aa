"""Tensors that leave their device and come back, while they, and all views of them, stay the same objects.

Only the storages are resized, as PyTorch's FSDP does with its flat parameters. Values wait in host memory, pinned if
the device is an accelerator. MindSpeed RL swaps the weights and optimizer states of training in the same way while the
engine generates on the same devices (arXiv 2507.19017, section 4.2).
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def storage_id(tensor: torch.Tensor) -> int:
    """The same for all views of one storage, whatever its size is at the time."""
    return int(tensor.untyped_storage()._cdata)


def copy_stream(device: torch.device) -> torch.Stream | None:
    """A stream beside the computing one; a CPU has none."""
    return None if device.type == "cpu" else torch.Stream(device)


class Swap:
    """The storages of some tensors of one device, which leave it and come back together.

    Args:
        tensors: those of one storage count once. Where storages have no memory yet, all have left already. A file that
            is mapped into memory, as on a CPU, stays where it is.
        stream: what copies to the device; None: the computing stream, as on a CPU.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], stream: torch.Stream | None = None) -> None:
        movable = (tensor for tensor in tensors if tensor.numel() and tensor.untyped_storage().resizable())
        self._whole = {storage_id(tensor): _whole(tensor) for tensor in movable}
        self._sizes = {key: whole.numel() * whole.element_size() for key, whole in self._whole.items()}
        self._stream = stream
        self._on_host: dict[int, torch.Tensor] = {}
        self._arrival: torch.Event | None = None
        self.is_away = any(whole.untyped_storage().nbytes() == 0 for whole in self._whole.values())
        weakref.finalize(self, _forget, tuple(self._whole))

    @property
    def storages(self) -> frozenset[int]:
        return frozenset(self._whole)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def to_host(self) -> None:
        """Copies all values to the host and gives the device's memory back to its allocator; waits for the copy."""
        if self.is_away:
            return
        self.wait()
        is_pinned = any(whole.device.type != "cpu" for whole in self._whole.values())
        for key, whole in self._whole.items():
            if key not in self._on_host:
                self._on_host[key] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=is_pinned)
            self._on_host[key].copy_(whole, non_blocking=True)
        if is_pinned:
            torch.accelerator.current_stream().synchronize()
        self.discard()

    def discard(self) -> None:
        """Gives the device's memory back: the values are what was copied to the host last, or undefined."""
        if self.is_away:
            return
        self.wait()
        for key, whole in self._whole.items():
            # A CPU's storage that numpy has seen keeps its memory for good.
            if whole.untyped_storage().resizable():
                whole.untyped_storage().resize_(0)
            if key in self._on_host:
                _AWAY[key] = self._on_host[key]
        self.is_away = True

    def prefetch(self) -> None:
        """Allocates the memory on the device and starts copying, without waiting.

        Raises:
            torch.OutOfMemoryError: there is no room; what was allocated is given back.
        """
        if not self.is_away:
            return
        # Allocated on the computing stream: memory freed there may be reused only after its pending work.
        allocated: list[torch.UntypedStorage] = []
        try:
            for key, whole in self._whole.items():
                if (storage := whole.untyped_storage()).nbytes() == 0:
                    storage.resize_(self._sizes[key])
                    allocated.append(storage)
        except RuntimeError:
            for storage in allocated:
                storage.resize_(0)
            raise
        with self._copying():
            for key, host in self._on_host.items():
                self._whole[key].copy_(host, non_blocking=True)
        for key in self._on_host:
            _AWAY.pop(key, None)
        self._arrival = None if self._stream is None else self._stream.record_event()
        self.is_away = False

    def wait(self) -> None:
        """What the computing stream does from now on finds the values on the device."""
        if self._arrival is not None:
            torch.accelerator.current_stream().wait_event(self._arrival)
            self._arrival = None

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Work inside runs on the copy stream, after everything already queued on the computing stream."""
        if self._stream is None:
            yield
            return
        computing = torch.accelerator.current_stream()
        self._stream.wait_stream(computing)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(computing)


_AWAY: dict[int, torch.Tensor] = {}
"""The whole values on the host of each storage that has left its device."""


def _forget(keys: Iterable[int]) -> None:
    for key in keys:
        _AWAY.pop(key, None)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the values on the host of a tensor that has left its device; the tensor itself if it has not."""
    host = _AWAY.get(storage_id(tensor))
    return tensor if host is None else host.view(tensor.dtype).as_strided(*_place(tensor))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, [its bytes / item size]; one without memory belongs to this tensor alone."""
    num_items = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_items,), (1,), 0) if num_items else tensor.detach().view(-1)


def _place(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
