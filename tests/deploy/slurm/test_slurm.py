"""A real run as Slurm jobs, on real daemons; all nodes are on this host, so no link is lost here."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.local_run import command_of
from tests.support.slurm import Slurm, why_not
from tests.support.slurm_run import ITERATIONS, REWARD, SlurmRun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    slurm = Slurm({"m1": None, "m2": None})
    yield slurm
    slurm.close()


def test_a_run_survives_its_processes_and_its_time_limit(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    training, array = run.launch()
    run.wait_for_more()

    def own(module: str) -> list[psutil.Process]:
        return [p for p in slurm.processes() if module in (words := command_of(p)) and "deploy.slurm.task" not in words]

    def processes(module: str) -> list[psutil.Process]:
        return [p for p in own(module) if "async_rl.shared.programs.process_guard" not in command_of(p)]

    rank = next(p for p in processes("async_rl.trainer") if "async_rl.torchrun" not in command_of(p))
    rank.kill()
    took = {"a training rank is killed": run.wait_for_more()}
    instance = processes("inference_service")[0]
    instance.kill()
    run.wait_for(lambda: len(processes("inference_service")) == 2)
    run.wait_for_more()
    # As Slurm does when the time limit is near.
    slurm.ask("scancel", "--batch", "--signal=USR1", training)
    took["the time limit is near"] = run.wait_for_more()
    tasks = {task["name"]: task for task in run.status()["tasks"]}
    assert tasks["trainer"]["state"] == "running" and tasks["trainer"]["restarts"] == 1, tasks
    assert sorted(tasks[f"instance-{i}"]["restarts"] for i in (0, 1)) == [0, 1]
    assert tasks["trainer"]["host"] in ("m1", "m2")
    run.finish(training, array)
    assert run.status()["num_trained"] == ITERATIONS
    assert {task["state"] for task in run.status()["tasks"] if task["name"] == "trainer"} == {"done"}
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
