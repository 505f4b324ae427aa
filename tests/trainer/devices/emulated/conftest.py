"""Local runs on emulated NPUs, both pools of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.devices.emulated.build import lacking
from tests.support.devices.emulated.environment import emulated_environment
from tests.support.local_run import Run


@dataclass(frozen=True)
class EmulatedRun:
    """A run that is not yet started, and the folder with the records of its programs' waits."""

    run: Run
    folder: Path

    def train(self, *overrides: str) -> "EmulatedRun":
        """To the end; no program may have used memory that another stream writes, without waiting for it."""
        self.run.train("--trainer.device=npu", *overrides)
        assert not self.races(), self.races()
        return self

    def races(self) -> list[str]:
        files = (self.folder / "records").glob("*.waits")
        return [line for file in files for line in file.read_text().splitlines() if line.startswith("race in ")]


@pytest.fixture(scope="module")
def emulated_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Iterator[Callable[..., EmulatedRun]]:
    """`emulated_run("name", "qwen3_moe", faults="lost:200")`: variables are those of `emulated_environment`."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    runs: list[Run] = []

    def make(name: str, family: str = "qwen3", **variables: object) -> EmulatedRun:
        folder = tmp_path_factory.mktemp(name)
        model = tiny_model(family, tied=True) if family == "qwen3" else tiny_model(family)
        runs.append(Run(folder, model, emulated_environment(folder, **variables)))
        return EmulatedRun(runs[-1], folder)

    yield make
    for run in runs:
        run.end()
