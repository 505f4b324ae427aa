"""Local runs on emulated NPUs, both pools of them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices.emulated.build import lacking
from tests.support.devices.emulated.environment import MINDSPEED, emulated_environment, recorded_races
from tests.support.local_run import Run


@dataclass(frozen=True)
class EmulatedRun:
    """A run that is not yet started, and the folder with the records of its programs' waits."""

    run: Run
    folder: Path

    def train(self, *overrides: str) -> "EmulatedRun":
        """To the end; no program may have used memory that another stream writes, without waiting for it."""
        self.run.train("--trainer.device=npu", *overrides)
        assert not recorded_races(self.folder)
        return self


@pytest.fixture(scope="session")
def mindspeed() -> str:
    """A checkout of the real one."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    if MINDSPEED not in os.environ:
        pytest.skip(f"{MINDSPEED} names no checkout of Ascend/MindSpeed, branch core_r0.16.0")
    return os.environ[MINDSPEED]


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3": ("qwen3", {"tied": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    # Without a choice of experts, which rounding can change.
    "all_experts": ("qwen3_moe", {"num_experts_per_tok": 4}),
}


@pytest.fixture(scope="module")
def emulated_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[Callable[..., EmulatedRun]]:
    """`emulated_run("name", "qwen3_moe", faults="lost:200")`: one of MODELS, and options of `emulated_environment`."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    runs: list[Run] = []

    def make(name: str, model: str = "qwen3", **options: Any) -> EmulatedRun:
        folder = tmp_path_factory.mktemp(name)
        family, sizes = MODELS[model]
        runs.append(Run(folder, tiny_model(family, **sizes), emulated_environment(folder, **options)))
        return EmulatedRun(runs[-1], folder)

    yield make
    for run in runs:
        run.end()
