"""The machine that launchers see, and a folder with stand-ins for what they start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import deploy.doctor.__main__ as doctor
import deploy.init.__main__ as init
from deploy.doctor import host
from deploy.local import check
from deploy.local.machine_memory import HostMemory
from deploy.local.memory_fit import GIB
from tests.support.stand_ins import METRICS, Ground


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of the machine is said of one with these cores and this memory, wherever the tests run."""
    for module in (check, doctor, init):
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(64 * GIB, 48 * GIB))
    for module in (host, init):
        monkeypatch.setattr(module, "own_cores", lambda: (0, 1, 2, 3))


@pytest.fixture
def record() -> Callable[..., dict[str, object]]:
    """`record(7, reward_mean=0.9)` -> a record of `metrics.jsonl` for iteration 7."""

    def make(iteration: int, **changes: object) -> dict[str, object]:
        return {**METRICS, "iteration": iteration, **changes}

    return make


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    made = Ground(tmp_path)
    yield made
    made.kill_left()
