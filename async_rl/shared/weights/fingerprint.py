"""The tensors of a weight transfer, and the fingerprint over them that both ends compute: of equal ones it is equal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np
import torch
import xxhash

from async_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (torch attribute name) and shape of one tensor of the stream."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"tensor {self.name!r} has dtype {self.dtype_name!r}, which torch does not know")
        return dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Stream = Iterable[tuple[TensorSpec, torch.Tensor]]
MakeStream = Callable[[], Stream]
"""Starts the stream of a publish; each tensor keeps its values until the stream has ended."""


class Fingerprint:
    """xxh3-128 over the stream: per tensor its name, dtype, shape and bytes, folded in stream order.

    Both ends feed it the tensors as they pass; equal hex digests mean equal weights under equal names.
    """

    def __init__(self) -> None:
        self._fold = xxhash.xxh3_128()

    def add(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """Adds one tensor; `data` is its uint8 view on any device, [num_bytes]."""
        self.add_pieces(spec, [data.cpu()])

    def add_pieces(self, spec: TensorSpec, pieces: Iterable[torch.Tensor]) -> None:
        """Adds one tensor, of which the pieces are the bytes in order, on the host, each uint8 [its bytes]."""
        of_tensor = xxhash.xxh3_128()
        for piece in pieces:
            of_tensor.update(piece.numpy().data)
        self.add_digest(spec, of_tensor.digest())

    def add_digest(self, spec: TensorSpec, of_tensor: bytes) -> None:
        """Adds one tensor by the xxh3-128 of its bytes."""
        self._fold.update(f"{spec.name}|{spec.dtype_name}|{spec.shape}|".encode())
        self._fold.update(of_tensor)

    def hexdigest(self) -> str:
        return self._fold.hexdigest()


def base_digest(tensors: Stream) -> str:
    """xxh3-128 over the weights below adapters by their names, in whatever order they come; on the host.

    Both ends compute it of what they hold: equal digests mean equal weights under equal names.
    """
    digests = {}
    for spec, tensor in tensors:
        of_tensor = Fingerprint()
        of_tensor.add(spec, tensor.detach().contiguous().view(-1).view(torch.uint8))
        digests[spec.name] = of_tensor.hexdigest()
    return xxhash.xxh3_128("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


SUMMED_BYTES = 64 * 2**20
"""Tensors are summed together until they have so many bytes: small ones would each cost some launches of kernels."""

BLOCK_WORDS = 2**20


class DeviceFingerprint:
    """As `Fingerprint`, computed where the tensors are: 16 bytes for each `SUMMED_BYTES` come to the host, at the end.

    Per run of tensors two sums over its 32-bit words w, mod 2^64, with odd pseudo-random multipliers a:
    sum_k a_k sum_j a_j w_kj, k the block of `BLOCK_WORDS` and j the place in it. Integers add up to the same in any
    order, on any device. One changed word always shows, since an odd number times its difference is not 0 mod 2^64;
    other changes do unless both sums agree by chance. It finds faults, not forgers.
    """

    def __init__(self) -> None:
        self._fold = xxhash.xxh3_128()
        self._parts: list[torch.Tensor] = []
        self._num_bytes = 0
        self._sums: list[torch.Tensor] = []

    def add(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """Adds one tensor; `data` is its uint8 view, [num_bytes], which keeps its values until the digest is taken."""
        self._fold.update(f"{spec.name}|{spec.dtype_name}|{spec.shape}|".encode())
        if self._parts and data.numel() >= SUMMED_BYTES:
            # A large one is summed alone, where it is.
            self._sum_up()
        self._parts.append(data)
        self._num_bytes += data.numel()
        if self._num_bytes >= SUMMED_BYTES:
            self._sum_up()

    def hexdigest(self) -> str:
        if self._parts:
            self._sum_up()
        if self._sums:
            self._fold.update(torch.stack(self._sums).cpu().numpy().tobytes())
        return self._fold.hexdigest()

    def _sum_up(self) -> None:
        data, padding = self._parts[0], -self._num_bytes % 4
        if len(self._parts) > 1 or padding or data.storage_offset() % 4:
            data = torch.cat([*self._parts, data.new_zeros(padding)])
        self._sums.append(_word_sums(data.view(torch.int32)))
        self._parts, self._num_bytes = [], 0


def _word_sums(words_N: torch.Tensor) -> torch.Tensor:
    """Both sums of a run of words, int64 [2]."""
    multipliers_2J = _multipliers(words_N.device)
    sums = []
    for k, block_J in enumerate(words_N.split(BLOCK_WORDS)):
        wide_J = block_J.to(torch.int64)
        inner_2 = (multipliers_2J[:, : len(wide_J)] * wide_J).sum(1)
        sums.append(inner_2 * multipliers_2J[:, k])
    return torch.stack(sums).sum(0)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers, int64 [2, BLOCK_WORDS]: splitmix64 of 0, 1, ..."""
    state = np.arange(1, 2 * BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64).reshape(2, BLOCK_WORDS)).to(device)


def fingerprint_on(device: torch.device) -> Fingerprint | DeviceFingerprint:
    """That of a weight group whose tensors are on `device`."""
    return Fingerprint() if device.type == "cpu" else DeviceFingerprint()
