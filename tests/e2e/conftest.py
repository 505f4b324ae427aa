"""Local runs that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_run import Run


@pytest.fixture
def new_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Callable[[str], Run]]:
    """Runs by name; what still runs at the end is ended."""
    runs: list[Run] = []

    def make(name: str) -> Run:
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, tiny_model("qwen3", tied=True)))
        return runs[-1]

    yield make
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)
