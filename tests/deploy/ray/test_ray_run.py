"""Whole runs on a real Ray cluster of several nodes on this host: real instances, the real trainer, real losses."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.ray.supervisor import PLACEMENT_TIMEOUT_S
from tests.support.local_run import gone
from tests.support.ray_cluster import RayNodes, RayRun, needs_ray, proven, ray_nodes

pytestmark = [pytest.mark.distributed, needs_ray, pytest.mark.timeout(600)]

NUM_RESPONSES = 24
"""6 prompts of 4 responses, see `local_run.CONFIG`."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Room for two instances and one training node, and one node to spare."""
    with ray_nodes(4) as nodes:
        yield nodes


@pytest.fixture
def run(nodes: RayNodes, tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[RayRun]:
    run = RayRun(tmp_path, tiny_model("qwen3", tied=True))
    run.address = nodes.address
    run.config.write_text(run.config.read_text() + "[inference]\nnum_instances = 2\n[checkpoint]\nevery = 1\n")
    yield run
    run.kill()
    assert gone(run.tasks()), "no task outlives its launcher"


def slow(run: RayRun, iterations: int) -> tuple[str, ...]:
    """Iterations of more than half a second, so that something can happen meanwhile."""
    return (f"--reward.name=python:{run.reward}:slow", f"--train.iterations={iterations}")


def test_a_run_with_two_instances_and_one_training_node_is_proven(run: RayRun) -> None:
    run.start()
    assert run.finish() == 0, run.everything_said()
    proven(run, 3, NUM_RESPONSES)
    assert gone(run.tasks(), timeout_s=5)
    launch = json.loads((run.dir / "launch.json").read_text())
    assert launch["engine"] == "ray"
    assert [(task["name"], task["state"], task["restarts"]) for task in launch["tasks"]] == [
        ("trainer-0", "done", 0),
        ("instance-0", "done", 0),
        ("instance-1", "done", 0),
    ]
    assert {log.name for log in run.dir.glob("logs/*.log")} == {"trainer-0.log", "instance-0.log", "instance-1.log"}
    assert "2 instance(s) ready, starting the trainer" in run.output.read_text()
    assert "3/3 done" in run.output.read_text()


def test_lost_actors_and_nodes_come_back_and_the_run_ends_proven(run: RayRun, nodes: RayNodes) -> None:
    """An instance's actor, the trainer's process, the trainer's actor and the raylet below it, one after the other."""
    iterations = 30
    took_s: dict[str, tuple[float, float]] = {}
    run.start(*slow(run, iterations))

    def restarts() -> dict[str, int]:
        tasks = json.loads((run.dir / "launch.json").read_text())["tasks"]
        return {task["name"]: task["restarts"] for task in tasks if task["state"] == "running"}

    def progress_after(loss: Callable[[], None], task: str, name: str) -> None:
        begun_s, restarted = time.monotonic(), restarts()[task]
        loss()
        again_s = run.wait_for(lambda: restarts().get(task) == restarted + 1)
        before = len(run.lines("ledger.jsonl"))
        run.wait_for(lambda: len(run.lines("ledger.jsonl")) > before)
        took_s[name] = again_s, time.monotonic() - begun_s

    run.wait_for(lambda: len(run.lines("ledger.jsonl")) >= 2)
    instance = run.guard_of("--name", "instance-1")
    progress_after(instance.parent().kill, "instance-1", "the actor of an instance")
    assert gone([instance]), "what it ran ends with it"
    progress_after(run.rank().kill, "trainer-0", "the training process")
    trainer = run.guard_of("async_rl.torchrun")
    progress_after(trainer.parent().kill, "trainer-0", "the actor of the trainer")
    assert gone([trainer])
    trainer = run.guard_of("async_rl.torchrun")
    progress_after(lambda: nodes.kill_raylet_of(trainer), "trainer-0", "the raylet of the trainer")
    assert gone([trainer])
    assert run.finish() == 0, run.everything_said()
    proven(run, iterations, NUM_RESPONSES)
    for what, (again_s, trained_s) in took_s.items():
        print(
            f"{what} lost: started again after {again_s:.1f} s, the next iteration is trained after {trained_s:.1f} s"
        )


def test_a_signal_lets_the_trainer_save_and_ends_every_task(run: RayRun) -> None:
    run.start(*slow(run, 100), "--checkpoint.every=1000")
    run.wait_for(lambda: len(run.lines("ledger.jsonl")) >= 2)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.everything_said()
    assert gone(run.tasks(), timeout_s=5)
    assert list(run.dir.glob("checkpoints/*")), "the last whole iteration is saved"
    assert "stopped by SIGTERM; all its processes have ended" in run.output.read_text()


def test_a_killed_launcher_leaves_nothing_behind_and_lets_the_trainer_save(run: RayRun) -> None:
    run.start(*slow(run, 100), "--checkpoint.every=1000")
    run.wait_for(lambda: len(run.lines("ledger.jsonl")) >= 1)
    tasks = run.tasks()
    run.kill()
    assert gone(tasks, timeout_s=60)
    assert list(run.dir.glob("checkpoints/*")), "every task has its grace time"


def test_a_group_without_room_fails_in_time_and_says_what_was_asked_and_what_was_free(run: RayRun) -> None:
    run.start("--cluster.training_nodes=5")
    assert run.finish(PLACEMENT_TIMEOUT_S + 60) == 1
    said = run.output.read_text()
    assert "NotPlaced" in said and "has not placed training" in said, said
    assert "5 x CPU 2, each on a host of its own. Free: CPU" in said and "on all hosts together" in said, said


@pytest.mark.parametrize("address", ["127.0.0.1:1", "garbage"])
def test_a_cluster_that_is_not_there_is_reported(run: RayRun, address: str) -> None:
    run.address = address
    run.start()
    assert run.finish(60) == 2
    assert f"cannot connect to the Ray cluster at RAY_ADDRESS = '{address}'" in run.output.read_text()
