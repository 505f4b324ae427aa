"""One device of gloo for all process groups of a rank; `parallel.py` shares it before it makes the first.

torch makes one for each group, and Megatron some twenty groups, also for a single rank. Each device is a thread, which
gloo wakes every 10 ms to see whether it shall end: 2,000 times a second in a rank that waits for rollouts.

torch (2.7 to 2.13) takes a group's devices in its constructor only, which `new_group` calls by the name that is
replaced here. It can go when `new_group` takes devices, or when gloo's threads sleep until there is something to do.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

INTERFACES = "GLOO_SOCKET_IFNAME"

_devices: list[Any] = []


class SharingGloo(dist.ProcessGroupGloo):
    """Gloo's group, on the devices of this process."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = _shared_devices()
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """From now on all groups of gloo have the same device."""
    distributed_c10d.ProcessGroupGloo = SharingGloo  # type: ignore[misc]


def forget_device() -> None:
    """The next group gets a new one; the old one ends with its last group."""
    _devices.clear()


def _shared_devices() -> list[Any]:
    """As torch makes them: one for each interface that the environment names, else that of this host's name."""
    if not _devices:
        make = dist.ProcessGroupGloo.create_device
        names = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
        _devices.extend(make(interface=name) for name in names)
        if not names:
            _devices.append(dist.ProcessGroupGloo.create_default_device())
    return list(_devices)
