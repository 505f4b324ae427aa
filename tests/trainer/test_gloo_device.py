"""Groups of gloo that share a device: no thread of their own that wakes every 10 ms."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer import gloo_device
from trainer.gloo_device import SharingGloo
from trainer.parallel import Parallel

TASKS = Path("/proc/self/task")

pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="looks for threads in /proc")


def num_loops() -> int:
    return [(task / "comm").read_text().strip() for task in TASKS.iterdir()].count("gloo_tcp_loop")


def test_further_groups_take_no_further_loop_and_work(parallel: Parallel) -> None:
    before = num_loops()
    groups = [dist.new_group(backend="gloo") for _ in range(5)]
    assert num_loops() <= before, "all have the one of the first group"
    for number, group in enumerate(groups):
        numbers = torch.tensor([number, parallel.num_ranks])
        dist.all_reduce(numbers, group=group)
        assert numbers.tolist() == [number, 1]


def test_interfaces_that_the_environment_names_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_device, "_devices", [])
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    group = SharingGloo(dist.HashStore(), 0, 1, gloo_device.timedelta(seconds=60))
    assert len(group.options._devices) == 1
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "no-such")
    monkeypatch.setattr(gloo_device, "_devices", [])
    with pytest.raises(RuntimeError):
        SharingGloo(dist.HashStore(), 0, 1, gloo_device.timedelta(seconds=60))
