"""Local runs that end with their file, whose tests share them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_run import Run


@pytest.fixture(scope="module")
def new_run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Run]]:
    """`new_run("name", "qwen3_moe")` -> a run of that family in a folder of its own, not yet started."""
    runs: list[Run] = []

    def make(name: str, family: str = "qwen3") -> Run:
        model = tiny_model(family, tied=True) if family == "qwen3" else tiny_model(family)
        runs.append(Run(tmp_path_factory.mktemp(name), model))
        return runs[-1]

    yield make
    for run in runs:
        run.end()
