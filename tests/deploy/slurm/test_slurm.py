"""A real run as Slurm jobs, on real daemons; all nodes are on this host, so no link is lost here."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy.local.machine import free_ports
from tests.support.local_run import Run, command_of
from tests.support.slurm import Slurm, why_not

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

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


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    slurm = Slurm({"m1": None, "m2": None})
    yield slurm
    slurm.close()


class SlurmRun:
    """A run that `async-rl launch slurm` starts."""

    def __init__(self, slurm: Slurm, tmp_path: Path, model: Path) -> None:
        self.slurm, self.run = slurm, Run(tmp_path, model)
        self.run.reward.write_text(REWARD)
        fleet_port, master_port = free_ports(2)
        self.settings = (
            *(f"--reward.name=python:{self.run.reward}:paced", f"--train.iterations={ITERATIONS}"),
            *("--checkpoint.every=1", "--inference.num_instances=2", "--pool.timeout_s=240"),
            *(f"--pool.fleet_port={fleet_port}", f"--cluster.master_port={master_port}"),
            *("--cluster.patience_s=300", "--cluster.restart_delay_s=0.5", "--cluster.lease_s=4"),
        )

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.slurm.command([sys.executable, "-m", *words])
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=self.slurm.env())

    def launch(self, *more: str) -> tuple[str, str]:
        done = self.call("deploy.launch", "slurm", str(self.run.config), *self.settings, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        tasks = json.loads((self.run.dir / "launch.json").read_text())["tasks"]
        return tasks[0]["id"], tasks[1]["id"].partition("_")[0]

    def status(self) -> dict[str, object]:
        done = self.call("deploy.status", "--run", str(self.run.dir), "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, object] = json.loads(done.stdout)
        return status

    def num_trained(self) -> int:
        return len(self.run.lines("metrics.jsonl"))

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = START_S) -> float:
        """Returns the seconds that it took."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() < begun + timeout_s, self.everything_said()
            time.sleep(0.2)
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


def test_a_run_survives_its_processes_and_its_time_limit(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    training, array = run.launch()
    run.wait_for_more()

    def own(module: str) -> list[psutil.Process]:
        return [p for p in slurm.processes() if module in (words := command_of(p)) and "deploy.slurm.task" not in words]

    def processes(module: str) -> list[psutil.Process]:
        return [p for p in own(module) if "deploy.cluster.process_guard" not in command_of(p)]

    rank = next(p for p in processes("trainer") if "torch.distributed.run" not in command_of(p))
    rank.kill()
    took = {"a training rank is killed": run.wait_for_more()}
    instance = processes("inference_service")[0]
    instance.kill()
    run.wait_for(lambda: len(processes("inference_service")) == 2)
    run.wait_for_more()
    # As Slurm does when the time limit is near.
    slurm.ask("scancel", "--batch", "--signal=USR1", training)
    took["the time limit is near"] = run.wait_for_more()
    tasks = {task["name"]: task for task in run.status()["tasks"]}  # type: ignore[attr-defined]
    assert tasks["trainer"]["state"] == "running" and tasks["trainer"]["restarts"] == 1, tasks
    assert sorted(tasks[f"instance-{i}"]["restarts"] for i in (0, 1)) == [0, 1]
    assert tasks["trainer"]["host"] in ("m1", "m2")
    run.finish(training, array)
    assert run.status()["num_trained"] == ITERATIONS
    assert {task["state"] for task in run.status()["tasks"] if task["name"] == "trainer"} == {"done"}  # type: ignore[attr-defined]
    assert "the job goes back into the queue" in (run.run.dir / "logs" / "trainer.log").read_text()
    print(took)


def test_a_trainer_that_always_dies_ends_the_run_and_its_instances(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    run.run.reward.write_text(REWARD + "\nimport os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n")
    training, array = run.launch("--cluster.max_restarts=1")
    run.wait_for(lambda: not slurm.jobs(training))
    run.wait_for(lambda: not slurm.jobs(array), 60)
    said = (run.run.dir / "logs" / "trainer.log").read_text()
    assert "RestartsExhausted: trainer was started again 1 times without another iteration" in said


def test_scancel_with_sigint_saves_and_ends_the_run(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    training, array = run.launch("--checkpoint.every=1000")
    run.wait_for_more()
    slurm.ask("scancel", "--batch", "--signal=INT", training)
    run.wait_for(lambda: not slurm.jobs(training) and not slurm.jobs(array), 90)
    (checkpoint,) = (run.run.dir / "checkpoints").iterdir()
    assert checkpoint.name == f"iteration-{run.num_trained():06}"
