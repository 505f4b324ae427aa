"""A gloo broadcast of bytes and nothing else, to processes of its own: what a publish is compared with."""

import multiprocessing
import time
from typing import Any

import torch
import torch.distributed as dist

from async_rl.shared.weights.store import StoreServer, join_rendezvous
from async_rl.shared.weights.stream import WeightGroup

TIMEOUT_S = 300.0
"""A busy machine takes minutes to start a process."""
HOST = "127.0.0.1"
SECRET = "of this benchmark"


def receive_bare(port: int, rank: int, world_size: int, num_bytes: int, bucket_bytes: int) -> None:
    """In a process: receives broadcasts of `num_bytes` bytes, and confirms each, until the sender ends."""
    torch.set_num_threads(1)
    group = WeightGroup(join_rendezvous(HOST, port, SECRET, TIMEOUT_S), rank, world_size, "gloo", TIMEOUT_S)
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    while True:
        try:
            broadcast(group, buffer, bucket_bytes)
        except RuntimeError:
            return


def broadcast(group: WeightGroup, buffer: torch.Tensor, bucket_bytes: int) -> None:
    """Broadcasts bucket by bucket from rank 0, then waits for every rank."""
    collectives: Any = group._collectives
    gloo = collectives._group
    for bucket in buffer.split(bucket_bytes):
        gloo.broadcast([bucket], dist.BroadcastOptions()).wait()
    gloo.barrier(dist.BarrierOptions()).wait()


class BareBroadcast:
    """The sender and its receivers, which are separate processes."""

    def __init__(self, num_receivers: int, num_bytes: int, bucket_bytes: int) -> None:
        world_size = num_receivers + 1
        self._server = StoreServer(HOST, [SECRET] * num_receivers)
        spawn = multiprocessing.get_context("spawn")
        arguments = (world_size, num_bytes, bucket_bytes)
        self._processes = [
            spawn.Process(target=receive_bare, args=(self._server.port, rank, *arguments), daemon=True)
            for rank in range(1, world_size)
        ]
        for process in self._processes:
            process.start()
        self._group = WeightGroup(self._server.store(TIMEOUT_S), 0, world_size, "gloo", TIMEOUT_S)
        self._buffer = torch.ones(num_bytes, dtype=torch.uint8)
        self._bucket_bytes = bucket_bytes

    def seconds(self) -> float:
        started = time.monotonic()
        broadcast(self._group, self._buffer, self._bucket_bytes)
        return time.monotonic() - started

    def close(self) -> None:
        self._group.close()
        self._server.close()
        for process in self._processes:
            process.join()
