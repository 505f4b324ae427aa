"""Messages of a weight group that are on their way, or have arrived, and what becomes of the tensors in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from async_rl.shared.weights.chain import Passage
from async_rl.shared.weights.fingerprint import DeviceFingerprint, Fingerprint, TensorSpec

WINDOW_BYTES, MAX_IN_FLIGHT = 32 * 2**20, 8
"""Begun at once, in at least two messages: one passes while the next is made, or the last one copied."""


@dataclass(frozen=True, slots=True)
class Message:
    """A running broadcast: its bytes, uint8 [num_bytes], and the tensors in them."""

    work: Any
    data: torch.Tensor
    specs: Sequence[TensorSpec]
    parts: Sequence[torch.Tensor] | None = None
    """Sender: the bytes of each as they were before, which a device may read while it sends the message."""

    def tensors(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The bytes of each."""
        parts = self.data.split([spec.num_bytes for spec in self.specs]) if self.parts is None else self.parts
        return zip(self.specs, parts, strict=True)

    def add(self, fingerprint: Fingerprint | DeviceFingerprint, spec: TensorSpec, part: torch.Tensor) -> None:
        """Adds one of its tensors: one that passed a chain alone by the digest that it has there."""
        if isinstance(self.work, Passage) and self.work.is_hashed and isinstance(fingerprint, Fingerprint):
            fingerprint.add_digest(spec, self.work.digest)
        else:
            fingerprint.add(spec, part)


def bytes_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def is_full(in_flight: Collection[Message]) -> bool:
    """Whether one has to arrive before another is started."""
    enough = len(in_flight) > 1 and sum(message.data.numel() for message in in_flight) >= WINDOW_BYTES
    return enough or len(in_flight) >= MAX_IN_FLIGHT


def copy_to_destinations(
    message: Message, destinations: Mapping[str, torch.Tensor], fingerprint: Fingerprint | DeviceFingerprint
) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of a received message, each in its destination if it has one, and added to the fingerprint there."""
    for spec, raw in message.tensors():
        # A tensor may start at any byte of the message; a typed view needs its own alignment.
        aligned = raw if raw.storage_offset() % spec.dtype.itemsize == 0 else raw.clone()
        tensor = aligned.view(spec.dtype).view(spec.shape)
        destination = destinations.get(spec.name)
        if destination is not None and destination.data_ptr() != tensor.data_ptr():
            tensor = destination.copy_(tensor)
            fingerprint.add(spec, bytes_of(tensor, tensor.device))
        else:
            message.add(fingerprint, spec, raw)
        yield spec, tensor
