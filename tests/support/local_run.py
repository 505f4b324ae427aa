"""A local run on real parts, as a process that tests start, observe and kill."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from async_rl.rollouts.fleet.endpoint import FleetClient
from async_rl.shared.protocol.fleet import InstanceInfo, read_address
from tests.support.warm.interpreter import NAME as WARM_INTERPRETER

GUARD = "async_rl.shared.programs.process_guard"

VERIFICATION_S = 840.0
"""A minute on two idle cores."""

REWARD = '''
def vowels(prompt, responses, row):
    """Share of vowels: something a few steps can raise."""
    obey()
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]


vowels.correct_at = 0.5


def slow(prompt, responses, row):
    """Iterations of more than half a second, so that something can happen meanwhile."""
    import time

    time.sleep(0.15)
    return vowels(prompt, responses, row)


def uneven(prompt, responses, row):
    """Equal for the responses of every third prompt; finishes in an order of its own in each run."""
    import random
    import time

    time.sleep(random.uniform(0, 0.1))
    rewards = vowels(prompt, responses, row)
    return [0.0] * len(responses) if int(prompt.prompt_id) % 3 == 0 else rewards


uneven.correct_at = 0.3


def obey():
    """Does what the file `told` beside this one says: waits until it says something else, fails, or lets calls pass."""
    import pathlib
    import time

    told = pathlib.Path(__file__).with_name("told")
    if told.exists() and (word := told.read_text()).startswith("let "):
        _, number, calls = word.split()
        if number_of_call(told.with_name(calls)) >= int(number):
            while told.read_text() == word:
                time.sleep(0.02)
        return
    while (word := told.read_text() if told.exists() else "") == "wait":
        told.with_name("waits").touch()
        time.sleep(0.05)
    if word == "raise":
        raise KeyError("no such column")


def number_of_call(calls):
    """How many calls, in whatever process, were there before."""
    import itertools
    import os

    for number in itertools.count():
        try:
            os.close(os.open(calls / str(number), os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            pass


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
'''

EVALUATION = """
[evaluation]
every = 2
[[evaluation.sets]]
name = "held-out"
source = "{source}"
num_samples = 2
max_prompts = 4
"""
"""To be added to the config: an evaluation of four prompts, every second iteration."""

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
timeout_s = 120
[pool]
timeout_s = 20
[publish]
timeout_s = 20
[optimizer]
learning_rate = 1e-3
[train]
iterations = 3
"""


@dataclass(frozen=True)
class End:
    """How a start of a run ended, and what it left."""

    code: int
    output: str
    restarts: dict[str, int]
    num_trained: int
    checkpoints: list[Path]
    left_processes: list[list[str]]


class Run:
    """One local run of a config; `start` returns immediately. Its programs get `environment`, or that of the test."""

    def __init__(self, tmp_path: Path, model: Path, environment: Mapping[str, str] | None = None) -> None:
        self.environment = environment
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
        self._calls = tmp_path
        self._num_let = 0

    def start(self, *overrides: str) -> None:
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.local.run", str(self.config), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._variables,
            )

    def verify(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """`async-rl verify` of its config, to the end: the exit code, `verify.json`, and what was printed."""
        out = self.dir.with_name("verified")
        done = subprocess.run(
            [sys.executable, "-m", "deploy.verify", str(self.config), "--out", str(out), *words],
            env=self._variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=VERIFICATION_S,
        )
        report = out / "verify.json"
        return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr

    @property
    def _variables(self) -> dict[str, str]:
        return {**(self.environment or os.environ), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def send(self, number: signal.Signals) -> None:
        """To the launcher."""
        assert self.process is not None
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 280) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def train(self, *overrides: str) -> "Run":
        """Starts it and waits for its end, which has to be that of `train.iterations`."""
        self.start(*overrides)
        assert self.finish() == 0, self.everything_said()
        return self

    def end(self) -> None:
        """Ends what still runs of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def end_by(self, disturb: Callable[[], object], timeout_s: float = 120) -> End:
        """Waits for the end that this brings about."""
        processes = self.descendants()
        disturb()
        code = self.finish(timeout_s)
        is_gone = gone(processes)
        return End(
            code=code,
            output=self.output.read_text(),
            restarts=self.restarts(),
            num_trained=self.num_trained(),
            checkpoints=self.checkpoints(),
            left_processes=[] if is_gone else [command_of(p) for p in processes if p.is_running()],
        )

    def kill_trainer(self) -> None:
        """Kills torchrun and all ranks at once, as the loss of their host would."""
        for process in [p for p in self.descendants() if "async_rl.trainer" in command_of(p)]:
            process.kill()

    def copied_to(self, path: Path) -> "Run":
        """Another run of the same config, whose directory is a copy of this one's."""
        path.mkdir()
        other = copy.copy(self)
        other.dir, other.config, other.output = path / "run", path / "run.toml", path / "output.txt"
        shutil.copytree(self.dir, other.dir)
        other.config.write_text(self.config.read_text().replace(f'"{self.dir}"', f'"{other.dir}"'))
        other.process = None
        return other

    def tell(self, word: str) -> None:
        """What its rewards do from now on: "wait" or "raise", or "" for what they are there for."""
        # Whole, since they read it at any time.
        written = self.reward.with_name("telling")
        written.write_text(word)
        written.replace(self.reward.with_name("told"))

    def let(self, number: int) -> None:
        """Its rewards that wait go on; of the calls that begin from now on so many do, and further ones wait."""
        self._num_let += 1
        self._calls = self.reward.with_name(f"calls-{self._num_let}")
        self._calls.mkdir()
        self.tell(f"let {number} {self._calls.name}")

    def wait_for_calls(self, number: int) -> None:
        """Until so many calls of its rewards have begun since the last `let`."""
        self.wait_until(lambda: len(list(self._calls.iterdir())) >= number)

    def hold(self) -> None:
        """Makes its rewards wait, until the next `tell`; returns when one of them does."""
        waits = self.reward.with_name("waits")
        waits.unlink(missing_ok=True)
        self.tell("wait")
        self.wait_until(waits.exists)

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        everything = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in everything if command_of(p)[:1] != [WARM_INTERPRETER]]

    def instances(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "inference_service" in command_of(p)]

    def hang_instance(self) -> None:
        """Stops the first instance, which keeps what it has and does not answer any more."""
        next(p for p in self.instances() if GUARD not in command_of(p)).suspend()

    def ranks(self) -> list[psutil.Process]:
        """The training ranks."""
        no_rank = {"async_rl.torchrun", GUARD}
        return [
            p for p in self.descendants() if "async_rl.trainer" in (words := command_of(p)) and not no_rank & set(words)
        ]

    def producer(self) -> psutil.Process:
        (found,) = [p for p in self.descendants() if "async_rl.producer" in command_of(p)]
        return found

    def members(self) -> list[InstanceInfo]:
        """The instances of its pool."""
        return FleetClient(read_address(self.dir).url, None).info().instances

    def restarts(self) -> dict[str, int]:
        """Of each task, by its name."""
        tasks = json.loads((self.dir / "launch.json").read_text())["tasks"]
        return {task["name"]: task["restarts"] for task in tasks}

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / name
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def num_trained(self) -> int:
        return len(self.lines("metrics.jsonl"))

    def checkpoints(self) -> list[Path]:
        return sorted((self.dir / "checkpoints").iterdir())

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 240, pause_s: float = 0.05) -> None:
        """Waits for it, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process is not None and self.process.poll() is None, self.everything_said()
            assert time.monotonic() < deadline, self.everything_said()
            time.sleep(pause_s)

    def wait_for_iterations(self, number: int, timeout_s: float = 240) -> None:
        self.wait_until(lambda: self.num_trained() >= number, timeout_s)

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
