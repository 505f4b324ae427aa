"""The bytes of tensors on the host, piece by piece; those of a device pass two pinned buffers, which take turns."""

from collections.abc import Iterator

import torch

PIECE_BYTES = 32 * 2**20


class HostPieces:
    """While one piece is used, the next one is copied: copies to pinned memory wait for nothing but their device."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def of(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """`data`, uint8 [num_bytes], in order, each piece uint8 [at most `PIECE_BYTES`].

        A piece of a device keeps its values until the next one is asked for, here or of another tensor. What is on the
        host is one piece, and is not copied.
        """
        if data.device.type == "cpu":
            yield data
            return
        if not self._buffers:
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        pieces = data.split(PIECE_BYTES)
        arriving = self._begin(pieces[0], 0)
        for number in range(len(pieces)):
            piece, arrival = arriving
            if number + 1 < len(pieces):
                arriving = self._begin(pieces[number + 1], number + 1)
            arrival.synchronize()
            yield piece

    def _begin(self, piece: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Event]:
        host = self._buffers[number % 2][: piece.numel()]
        host.copy_(piece, non_blocking=True)
        return host, torch.accelerator.current_stream().record_event()
