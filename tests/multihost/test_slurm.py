"""Runs on a Slurm cluster of three hosts that loses nodes: an instance's, a training node."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.common.hosts import Hosts, why_not
from tests.support import slurm as cluster
from tests.support.slurm import Slurm
from tests.support.slurm_run import SlurmRun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

NETWORK = "data"
OPTIONS = ('--cluster.slurm_options={training = ["--nodelist=n1"], instances = ["--exclude=n1"]}',)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if (reason := why_not() or cluster.why_not()) is not None:
        pytest.skip(reason)
    hosts = Hosts({NETWORK: "/24"}, {f"n{i}": {NETWORK: f"10.78.3.{i}"} for i in (1, 2, 3)})
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    slurm = Slurm(hosts.hosts)
    yield slurm
    slurm.close()


def test_a_run_loses_an_instance_node_and_its_trainer_is_requeued(
    hosts: Hosts, slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    training, array = run.launch(*OPTIONS)
    run.wait_for(lambda: run.num_instances() == 2)
    placed = {task["name"]: task["host"] for task in run.status()["tasks"]}
    assert sorted(placed.values()) == ["n1", "n2", "n3"], placed

    lost = placed["instance-1"]
    hosts[lost].cut(NETWORK)
    begun = time.monotonic()
    took = {"the pool goes on without the instance": run.wait_for(lambda: run.num_instances() == 1)}
    run.wait_for(lambda: slurm.nodes()[lost].startswith("down"))
    took["Slurm counts the node as lost"] = time.monotonic() - begun
    run.wait_for(lambda: run.num_instances() == 2)
    took["the instance serves again, on another node"] = time.monotonic() - begun
    placed = {task["name"]: task["host"] for task in run.status()["tasks"]}
    assert placed["instance-1"] not in (lost, "n1"), placed
    # The copy that was cut off must not come between.
    hosts[lost].restore(NETWORK)
    run.wait_for_more()

    slurm.ask("scontrol", "requeue", training)
    took["the trainer is requeued, until its next iteration"] = run.wait_for_more()
    run.finish(training, array)
    print(took)


def test_two_training_nodes_train_and_the_loss_of_one_requeues_them(
    hosts: Hosts, slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """Hosts know each other by address alone: no name of another one can be resolved."""
    slurm.wait_for(lambda: set(slurm.nodes().values()) == {"idle"})
    run = SlurmRun(slurm, tmp_path, tiny_model("qwen3", tied=True))
    training, array = run.launch(
        *OPTIONS, "--cluster.training_nodes=2", "--inference.num_instances=1", "--trainer.lost_after_s=8"
    )
    run.wait_for_more()
    trains = slurm.ask("squeue", "--noheader", f"--jobs={training}", "--format=%N")
    lost = next(name for name in ("n2", "n3") if name in slurm.ask("scontrol", "show", "hostnames", trains).split())
    hosts[lost].cut(NETWORK)
    begun = time.monotonic()
    run.wait_for(lambda: slurm.nodes()[lost].startswith("down"))
    took = {"Slurm counts the node as lost": time.monotonic() - begun}
    run.wait_for_more()
    took["the next iteration, on another node"] = time.monotonic() - begun
    (trainer,) = [task for task in run.status()["tasks"] if task["role"] == "trainer"]
    assert (trainer["state"], trainer["restarts"]) == ("running", 1), "one loss counts once"
    hosts[lost].restore(NETWORK)
    run.finish(training, array)
    print(took)
