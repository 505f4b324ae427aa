"""A real run that `async-rl launch slurm` starts on a cluster of `slurm.py`, at the pace that a test sets."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.shared.net.free_ports import free_ports
from tests.support.local_run import Run
from tests.support.slurm import Slurm
from tests.support.waiting import wait_for

ITERATIONS = 60
START_S = 240

REWARD = '''
import pathlib, time

FINISH = pathlib.Path(__file__).with_name("finish")


def paced(prompt, responses, row):
    """About a second an iteration until the test has done what it does."""
    if not FINISH.exists():
        time.sleep(1)
    return [sum(c in "aeiou" for c in r.text) / max(len(r.text), 1) for r in responses]
'''


class SlurmRun:
    """A run that `async-rl launch slurm` starts."""

    def __init__(self, slurm: Slurm, tmp_path: Path, model: Path) -> None:
        self.slurm, self.run = slurm, Run(tmp_path, model)
        self.run.reward.write_text(REWARD)
        (fleet_port,) = free_ports(1)
        self.settings = (
            *(f"--reward.name=python:{self.run.reward}:paced", f"--train.iterations={ITERATIONS}"),
            *("--checkpoint.every=1", "--inference.num_instances=2", "--pool.timeout_s=240"),
            f"--pool.fleet_address=127.0.0.1:{fleet_port}",
        )

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.slurm.command([sys.executable, "-m", *words])
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=self.slurm.env())

    def launch(self, *more: str) -> tuple[str, str]:
        done = self.call("deploy.launch", "slurm", str(self.run.config), *self.settings, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        tasks = json.loads((self.run.dir / "launch.json").read_text())["tasks"]
        return tasks[0]["id"], tasks[1]["id"].partition("_")[0]

    def status(self) -> dict[str, Any]:
        done = self.call("deploy.status", "--run", str(self.run.dir), "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def num_trained(self) -> int:
        return len(self.run.lines("metrics.jsonl"))

    def num_instances(self) -> int:
        """Of the last iteration."""
        lines = self.run.lines("metrics.jsonl")
        return int(str(lines[-1]["num_instances"])) if lines else 0

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_S) -> float:
        """Returns the seconds that it took."""
        begun = time.monotonic()
        wait_for(condition, timeout_s, self.everything_said)
        return time.monotonic() - begun

    def wait_for_more(self, timeout_s: float = START_S) -> float:
        """Until another iteration than now is trained; returns the seconds."""
        before = self.last_iteration()
        return self.wait_for(lambda: self.last_iteration() > before, timeout_s)

    def last_iteration(self) -> int:
        lines = self.run.lines("ledger.jsonl")
        return int(str(lines[-1]["iteration"])) if lines else -1

    def finish(self, training: str, array: str) -> None:
        """Lets it train at full speed, to its end, and checks the proof."""
        (self.run.reward.parent / "finish").touch()
        self.wait_for(lambda: not self.slurm.jobs(training))
        self.wait_for(lambda: not self.slurm.jobs(array), 60)
        proofs = self.run.lines("ledger.jsonl")
        assert [proof["iteration"] for proof in proofs] == list(range(ITERATIONS)), self.everything_said()
        assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs)

    def everything_said(self) -> str:
        logs = sorted(self.run.dir.glob("logs/*.log"))
        return "\n".join(
            [self.slurm.everything_said(), *(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)]
        )
