"""What tests of runs from Python have: a folder in which they start stand-ins for the instances and the trainer."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import async_rl
from tests.support.stand_ins import Ground

ROWS = [{"prompt": f"What is 1 + {number}?", "answer": str(1 + number)} for number in range(4)]


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    made = Ground(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    yield made
    made.kill_left()


@pytest.fixture
def train(ground: Ground) -> Iterator[Callable[..., Any]]:
    """`async_rl.train` of the stand-ins, in the folder `run`; what it started is ended."""
    started: list[Any] = []

    def start(reward: Any = "math", data: Any = ROWS, out: str = "run", quiet: bool = True, **settings: Any) -> Any:
        chosen = SETTINGS | settings
        started.append(async_rl.train("model", data, reward, out, quiet=quiet, **chosen))
        return started[-1]

    yield start
    for run in started:
        run.stop()


SETTINGS: dict[str, Any] = {
    "prompts": {"prompts_per_batch": 1, "max_prompt_tokens": 100, "chat_template": False},
    "rollout": {"max_response_tokens": 28},
    "train": {"iterations": 3},
    "checkpoint": {"grace_s": 5},
}
