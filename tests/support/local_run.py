"""A local run on real parts, as a process that tests start, observe and kill."""

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.warm.interpreter import NAME as WARM_INTERPRETER

REWARD = '''
def vowels(prompt, responses, row):
    """Share of vowels: something a few steps can raise."""
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]


vowels.correct_at = 0.5


def slow(prompt, responses, row):
    import time

    time.sleep(0.15)
    return vowels(prompt, responses, row)


def uneven(prompt, responses, row):
    """Equal for the responses of every third prompt; finishes in an order of its own in each run."""
    import random
    import time

    time.sleep(random.uniform(0, 0.1))
    return [0.0] * len(responses) if int(prompt.prompt_id) % 3 == 0 else vowels(prompt, responses, row)


def gated(prompt, responses, row):
    """Waits until its batch of six prompts, counted from 0, has a file of that name in `gates/`."""
    import pathlib
    import time

    here = pathlib.Path(__file__).parent
    begun = here / "gates" / "begun"
    begun.mkdir(exist_ok=True)
    others = sum(file.name != prompt.prompt_id for file in begun.iterdir())
    (begun / prompt.prompt_id).touch()
    while not (here / "gates" / str(others // 6)).exists():
        time.sleep(0.05)
    return vowels(prompt, responses, row)


def broken(prompt, responses, row):
    raise KeyError("no such column")
'''

CONFIG = """
[run]
dir = "{run_dir}"
seed = 5
[model]
path = "{model}"
[prompts]
source = "{data}"
prompts_per_batch = 6
max_prompt_tokens = 64
chat_template = false
[rollout]
responses_per_prompt = 4
max_response_tokens = 24
[reward]
name = "python:{reward}:vowels"
timeout_s = 20
[pool]
timeout_s = 20
[publish]
timeout_s = 20
[optimizer]
learning_rate = 1e-3
[train]
iterations = 3
"""


class Run:
    """One local run of a config; `start` returns immediately."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.dir = tmp_path / "run"
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"Word {i}: "}) + "\n" for i in range(40)))
        reward = tmp_path / "reward.py"
        reward.write_text(REWARD)
        self.reward = reward
        self.config = tmp_path / "run.toml"
        self.config.write_text(CONFIG.format(run_dir=self.dir, model=model, data=data, reward=reward))
        self.output = tmp_path / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *overrides: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.local.run", str(self.config), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def copied_to(self, path: Path) -> "Run":
        """Another run of the same config, whose directory is a copy of this one's."""
        path.mkdir()
        other = copy.copy(self)
        other.dir, other.config, other.output = path / "run", path / "run.toml", path / "output.txt"
        shutil.copytree(self.dir, other.dir)
        other.config.write_text(self.config.read_text().replace(f'"{self.dir}"', f'"{other.dir}"'))
        other.process = None
        return other

    def finish(self, timeout_s: float = 280) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        everything = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in everything if command_of(p)[:1] != [WARM_INTERPRETER]]

    def instances(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "inference_service" in command_of(p)]

    def wait_for_descendants(self, number: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.descendants()) < number:
            assert time.monotonic() < deadline, self.everything_said()
            time.sleep(0.05)

    def lines(self, name: str) -> list[dict[str, object]]:
        path = self.dir / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def wait_for_iterations(self, number: int, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.lines("metrics.jsonl")) < number:
            assert self.process is not None and self.process.poll() is None, self.everything_said()
            assert time.monotonic() < deadline, self.everything_said()
            time.sleep(0.05)

    def everything_said(self) -> str:
        logs = sorted(self.dir.glob("logs/*.log"))
        return "\n".join([self.output.read_text(), *(f"--- {log.name}\n{log.read_text()}" for log in logs)])


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has just ended, or is a zombie of another test."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def gone(processes: list[psutil.Process], timeout_s: float = 30) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return all(p.status() == psutil.STATUS_ZOMBIE for p in alive)
