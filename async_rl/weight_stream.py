"""The one weight transport, both ends of it: a group of one sender and all receivers, buckets, and the fingerprint.

The trainer's first rank is rank 0 and the only source; every worker of every inference instance is one more rank.
Tensors travel in a given order, packed into buckets of bytes, by `torch.distributed` broadcast (gloo, nccl or hccl).
Before each update every receiver announces through the group's store that it accepted the list of tensors; the sender
broadcasts only then, so a refused list never leaves it stuck in a collective.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported only where torch has distributed

from async_rl.errors import ConfigError, PublishError


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


class Fingerprint:
    """xxh3-128 over the stream: per tensor its name, dtype, shape and bytes, folded in stream order.

    Both ends feed it the tensors as they pass; equal hex digests mean equal weights under equal names.
    """

    def __init__(self) -> None:
        self._fold = xxhash.xxh3_128()

    def add(self, spec: TensorSpec, data: torch.Tensor) -> None:
        """Adds one tensor; `data` is its uint8 view on any device, [num_bytes]."""
        self._fold.update(f"{spec.name}|{spec.dtype_name}|{spec.shape}|".encode())
        self._fold.update(xxhash.xxh3_128_digest(data.cpu().numpy().data))

    def hexdigest(self) -> str:
        return self._fold.hexdigest()


def buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorSpec]]:
    """Cuts the stream into consecutive runs of at most `bucket_bytes`; a larger tensor is a bucket of its own.

    Both ends derive the same cuts from the same specs and size.
    """
    bucket: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if bucket and size + spec.num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(spec)
        size += spec.num_bytes
    if bucket:
        yield bucket


class WeightGroup:
    """The process group of one trainer rank (0) and all receiving workers (1 .. world_size - 1).

    It stands beside the default group of either process. Every wait ends within `timeout_s` in a PublishError.
    After any error the group is unusable on all ends: close it and open a new one.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        self._store = store
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._num_updates = 0
        self._device = torch.device({"gloo": "cpu", "nccl": "cuda", "hccl": "npu"}[backend])
        try:
            self._group = _make_group(store, rank, world_size, backend, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PublishError(
                f"not all {world_size} members of the weight group met within {timeout_s:g} s: {error}"
            ) from error

    @staticmethod
    def host_store(address: str, world_size: int, timeout_s: float) -> TCPStore:
        """Opens the rendezvous store on the sender, at a free port (`store.port`); returns at once."""
        return TCPStore(
            address, 0, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )

    @staticmethod
    def join_store(address: str, port: int, timeout_s: float) -> TCPStore:
        """Connects a receiver to the sender's store.

        Raises:
            PublishError: nothing answers at that address within the timeout.
        """
        try:
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PublishError(
                f"no weight store at {address}:{port} within {timeout_s:g} s: check publish.master_address"
            ) from error

    def announce(self, rank: int) -> None:
        """Receiver: tells the sender that this rank accepted the next update and is about to receive."""
        self._num_updates += 1
        self._store.set(f"update/{self._num_updates}/{rank}", "ready")

    def next_update(self) -> None:
        """Sender: begins the next update."""
        self._num_updates += 1

    def missing(self) -> list[int]:
        """Sender: the ranks that have not announced the current update yet; does not wait."""
        return [
            rank for rank in range(1, self._world_size) if not self._store.check([f"update/{self._num_updates}/{rank}"])
        ]

    def send(self, stream: Iterable[tuple[TensorSpec, torch.Tensor]], bucket_bytes: int) -> str:
        """Broadcasts all tensors of the stream, in order, and returns the fingerprint of what was sent."""
        fingerprint = Fingerprint()
        bucket: list[torch.Tensor] = []
        size = 0
        for spec, tensor in stream:
            data = tensor.detach().to(self._device).contiguous().view(-1).view(torch.uint8)
            fingerprint.add(spec, data)
            if bucket and size + data.numel() > bucket_bytes:
                self._broadcast(torch.cat(bucket))
                bucket, size = [], 0
            bucket.append(data)
            size += data.numel()
        if bucket:
            self._broadcast(torch.cat(bucket))
        return fingerprint.hexdigest()

    def receive(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yields (spec, tensor) in stream order; a tensor is a view into its bucket, valid until the next step."""
        for bucket in buckets(specs, bucket_bytes):
            data = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=self._device)
            self._broadcast(data)
            start = 0
            for spec in bucket:
                raw = data[start : start + spec.num_bytes]
                start += spec.num_bytes
                # A tensor may start at any byte of the bucket; a typed view needs its own alignment.
                aligned = raw if raw.storage_offset() % spec.dtype.itemsize == 0 else raw.clone()
                yield spec, aligned.view(spec.dtype).view(spec.shape)

    def close(self) -> None:
        """Drops the connections, which ends the wait of any other member; a second call does nothing."""
        if self._group is not None:
            self._group.shutdown()
            # gloo closes its sockets only with the object itself.
            self._group = None

    def _broadcast(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        started = time.monotonic()
        try:
            self._group.broadcast([data], options).wait()
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise PublishError(
                f"the weight broadcast broke after {waited:.1f} s (timeout {self._timeout_s:g} s): {error}"
            ) from error


def _make_group(store: TCPStore, rank: int, world_size: int, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    # torch_npu is there only where there is an NPU; it has no type of its own in torch.distributed.
    module = dist if backend == "nccl" else import_module("torch_npu._C._distributed_c10d")
    group_type = getattr(module, f"ProcessGroup{backend.upper()}")
    options = group_type.Options()
    options._timeout = timeout
    return group_type(store, rank, world_size, options)
