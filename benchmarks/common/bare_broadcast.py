"""A gloo broadcast of bytes and nothing else, to processes of its own: what a publish is compared with."""

import multiprocessing
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 300.0
"""A busy machine takes minutes to start a process."""
TIMEOUT = timedelta(seconds=TIMEOUT_S)
HOST = "127.0.0.1"


def gloo_group(store: dist.TCPStore, rank: int, world_size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def receive_bare(port: int, rank: int, world_size: int, num_bytes: int, bucket_bytes: int) -> None:
    """In a process: receives broadcasts of `num_bytes` bytes, and confirms each, until the sender ends."""
    torch.set_num_threads(1)
    group = gloo_group(dist.TCPStore(HOST, port, timeout=TIMEOUT), rank, world_size)
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    while True:
        try:
            broadcast(group, buffer, bucket_bytes)
        except RuntimeError:
            return


def broadcast(group: Any, buffer: torch.Tensor, bucket_bytes: int) -> None:
    """Broadcasts bucket by bucket from rank 0, then waits for every rank."""
    for bucket in buffer.split(bucket_bytes):
        group.broadcast([bucket], dist.BroadcastOptions()).wait()
    group.barrier(dist.BarrierOptions()).wait()


class BareBroadcast:
    """The sender and its receivers, which are separate processes."""

    def __init__(self, num_receivers: int, num_bytes: int, bucket_bytes: int) -> None:
        world_size = num_receivers + 1
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        spawn = multiprocessing.get_context("spawn")
        arguments = (world_size, num_bytes, bucket_bytes)
        self._processes = [
            spawn.Process(target=receive_bare, args=(store.port, rank, *arguments), daemon=True)
            for rank in range(1, world_size)
        ]
        for process in self._processes:
            process.start()
        self._group = gloo_group(store, 0, world_size)
        self._buffer = torch.ones(num_bytes, dtype=torch.uint8)
        self._bucket_bytes = bucket_bytes

    def seconds(self) -> float:
        started = time.monotonic()
        broadcast(self._group, self._buffer, self._bucket_bytes)
        return time.monotonic() - started

    def close(self) -> None:
        # gloo closes its sockets with the object itself.
        self._group = None
        for process in self._processes:
            process.join()
