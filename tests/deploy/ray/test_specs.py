from pathlib import Path
from typing import Any

import pytest

from async_rl.config.sections import Config
from deploy.cluster.plan import ClusterPlan, plan_cluster
from deploy.ray.__main__ import main
from deploy.ray.groups import Node
from deploy.ray.specs import bundle, describe, instance_group, training_group
from tests.support.minimal_config import MINIMAL, minimal_tree

NODES = [Node("a", "10.0.0.1", (4001, 4002)), Node("b", "10.0.0.2", (5001, 5002))]


def plan(**sections: dict[str, Any]) -> ClusterPlan:
    return plan_cluster(Path("run.toml"), Config(**{**minimal_tree(), **sections}), ("--train.iterations=5",))


def option(argv: tuple[str, ...], name: str) -> str:
    """The value of an option, the last one as in every program."""
    values = [word.partition("=")[2] for word in argv if word.startswith(f"{name}=")]
    return values[-1] if values else argv[argv.index(name) + 1]


def test_training_tasks_meet_at_the_first_host_at_ports_that_are_free_there() -> None:
    processes = training_group(plan(cluster={"training_nodes": 2})).processes(NODES)
    assert [process.name for process in processes] == ["trainer-0", "trainer-1"]
    for rank, process in enumerate(processes):
        assert option(process.argv, "--node-rank") == str(rank)
        assert option(process.argv, "--master-addr") == "10.0.0.1"
        assert option(process.argv, "--master-port") == "4001"
        assert option(process.argv, "--pool.fleet_address") == "10.0.0.1:4002"
        assert option(process.argv, "--run.resume") == "true" and "--train.iterations=5" in process.argv


def test_every_task_and_rank_that_is_stopped_is_noticed() -> None:
    this_plan = plan(trainer={"lost_after_s": 12.0})
    (trainer,) = training_group(this_plan).processes(NODES[:1])
    (instance,) = instance_group(this_plan, "instance-0").processes(NODES[1:])
    assert (trainer.stopped_after_s, instance.stopped_after_s) == (42.0, 42.0)
    assert option(trainer.argv, "--stopped-after-s") == "42.0"


def test_a_fleet_port_of_the_config_is_kept() -> None:
    (process,) = training_group(plan(pool={"fleet_address": "127.0.0.1:8700"})).processes(NODES[:1])
    assert option(process.argv, "--pool.fleet_address") == "10.0.0.1:8700"


def test_an_instance_finds_its_trainer_by_the_directory_of_the_run() -> None:
    (process,) = instance_group(plan(), "instance-3").processes(NODES[1:])
    assert option(process.argv, "--register") == str(Path.cwd() / "runs/x")
    assert option(process.argv, "--name") == "instance-3" and option(process.argv, "--port") == "5001"
    assert process.log_file == Path.cwd() / "runs/x/logs/instance-3.log"


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", {"CPU": 3}), ("cuda", {"CPU": 3, "GPU": 2}), ("npu", {"CPU": 3, "NPU": 2})]
)
def test_a_task_asks_for_its_cores_and_its_devices(device: str, expected: dict[str, float]) -> None:
    made = plan(trainer={"device": device, "num_processes": 2}, inference={"engine": "vllm"})
    assert bundle(made.node) == expected


def test_the_dry_run_shows_groups_and_commands_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_RL_TOKEN", "between hosts")
    config = tmp_path / "run.toml"
    config.write_text(MINIMAL + "[cluster]\ntraining_nodes = 2\nmax_instances = 4\n[inference]\nnum_instances = 2\n")
    assert main([str(config), "--dry-run"]) == 2
    said, wrong = capsys.readouterr()
    assert "some/model" in wrong and "rows.jsonl" in wrong, "what is wrong is told after what would be run"
    assert "placement group training: STRICT_SPREAD [{'CPU': 2.0}, {'CPU': 2.0}]" in said
    assert said.count("placement group instance-") == 2 and "up to 4 instances in all" in said
    assert "async_rl.torchrun --nnodes 2 --node-rank 1" in said and "--master-addr ADDRESS" in said
    assert "between hosts" not in said


def test_the_description_names_every_task_of_the_plan() -> None:
    said = describe(plan(inference={"num_instances": 3}))
    assert [name in said for name in ("trainer-0", "instance-0", "instance-1", "instance-2")] == [True] * 4
    assert "starts the producer" in said
