"""How a weight stream is cut into the messages of a weight group: both ends derive the same division.

`stream.py` sends and receives them; checkpoints are read in the same runs.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from async_rl.shared.weights.fingerprint import TensorSpec

T = TypeVar("T")

BUCKET_BYTES = 64 * 2**20
"""One broadcast carries so many at most: few messages, and little memory beside the weights."""

DEVICE_BUCKET_BYTES = 320 * 2**20
"""The same between devices, where a message costs about a millisecond: fewer than 200 for Qwen3-30B-A3B, whose experts
have 3 MiB a matrix."""

ALONE_BYTES = 2**20
"""On a CPU a tensor of this size is sent alone: copying it into a bucket costs more than a message."""


def bucket_bytes_of(backend: str) -> int:
    """Of each broadcast in a group of this backend."""
    return DEVICE_BUCKET_BYTES if backend in ("nccl", "hccl") else BUCKET_BYTES


def buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> Iterator[list[TensorSpec]]:
    """Cuts the stream into consecutive runs of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    return _cut(specs, lambda spec: spec.num_bytes, bucket_bytes, alone_bytes=None)


def messages(
    items: Iterable[T], spec_of: Callable[[T], TensorSpec], bucket_bytes: int, device: torch.device
) -> Iterator[list[T]]:
    """The tensors of each broadcast; both ends derive the same division, from specs, size and kind of device."""
    alone_bytes = ALONE_BYTES if device.type == "cpu" else None
    return _cut(items, lambda item: spec_of(item).num_bytes, bucket_bytes, alone_bytes)


def _cut(
    items: Iterable[T], num_bytes_of: Callable[[T], int], bucket_bytes: int, alone_bytes: int | None
) -> Iterator[list[T]]:
    bucket: list[T] = []
    size = 0
    for item in items:
        num_bytes = num_bytes_of(item)
        alone = alone_bytes is not None and num_bytes >= alone_bytes
        if bucket and (alone or size + num_bytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        if alone:
            yield [item]
            continue
        bucket.append(item)
        size += num_bytes
    if bucket:
        yield bucket
