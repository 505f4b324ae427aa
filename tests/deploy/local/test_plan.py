import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.config.file import parse_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.cluster.plan import plan_cluster
from deploy.local.machine import Machine
from deploy.local.plan import describe, num_ports, plan, plan_instances


def make_config(**changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"dir": "runs/one"},
        "model": {"path": "a-model", "dtype": "bfloat16"},
        "prompts": {"source": "rows.jsonl", "prompts_per_batch": 8, "max_prompt_tokens": 100},
        "rollout": {"max_response_tokens": 28},
        "reward": {"name": "math"},
        "train": {"iterations": 3},
        "trainer": {"num_processes": 2},
        "inference": {"num_instances": 2, "max_concurrency": 7},
    }
    return parse_config({**tree, **changes}, source="test")


def option(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_an_instance_is_started_with_the_configs_values() -> None:
    made = plan(Path("c.toml"), make_config(), [], machine=Machine((0, 1, 2, 3)), ports=[8001, 8002])
    argv = made.instances[1].argv
    assert argv[1:3] == ("-m", "inference_service")
    expected = {
        "--engine": "transformers",
        "--model": "a-model",
        "--host": "127.0.0.1",
        "--port": "8002",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--max-concurrency": "7",
        "--max-model-len": "128",
    }
    assert {name: option(argv, name) for name in expected} == expected
    assert made.urls == ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
    assert [process.name for process in made.instances] == ["instance-0", "instance-1"]


def test_an_instance_of_vllm_runs_under_its_own_python_with_its_own_arguments() -> None:
    inference = {
        "engine": "vllm",
        "python": "other/bin/python",
        "tensor_parallel": 2,
        "engine_options": ["--enforce-eager", "--seed=3"],
    }
    (process,) = plan(Path("c.toml"), make_config(inference=inference), [], machine=Machine(), ports=[8001]).instances
    assert process.argv[:3] == ("other/bin/python", "-m", "inference_service")
    assert option(process.argv, "--engine") == "vllm" and option(process.argv, "--tp") == "2"
    assert process.argv[-3:] == ("--", "--enforce-eager", "--seed=3")


def test_instances_of_an_exact_run_compute_exactly() -> None:
    for is_exact in (False, True):
        config = make_config(train={"iterations": 3, "exact": is_exact}, model={"path": "a-model", "dtype": "float32"})
        made = plan(Path("c.toml"), config, [], machine=Machine(), ports=[8001, 8002])
        argv = plan_cluster(Path("c.toml"), config, []).instance_argv(name="i", port=0, register="r")
        assert all(("--exact" in argv) == is_exact for argv in (*(i.argv for i in made.instances), argv))


def test_the_trainer_runs_under_torchrun_with_overrides_and_the_instances() -> None:
    overrides = ["--train.iterations", "5"]
    made = plan(Path("c.toml"), make_config(), overrides, machine=Machine(), ports=[8001, 8002])
    argv = made.trainer.argv
    assert argv[1:3] == ("-m", "async_rl.torchrun")
    assert {process.env["PYTHONSAFEPATH"] for process in (*made.instances, made.trainer)} == {"1"}
    assert "--standalone" in argv and option(argv, "--nproc-per-node") == "2"
    assert argv.index("--stopped-after-s") < argv.index("-m", 2), "it is torchrun's option"
    assert argv[-7:] == (
        *("-m", "async_rl.trainer", "c.toml", "--train.iterations", "5", "--pool.instances"),
        '["http://127.0.0.1:8001", "http://127.0.0.1:8002"]',
    )


def test_every_process_that_is_stopped_is_noticed_after_the_peers_of_a_rank_would_notice_it() -> None:
    config = make_config(trainer={"lost_after_s": 12.0})
    made = plan(Path("c.toml"), config, [], machine=Machine(), ports=[8001, 8002])
    assert {process.stopped_after_s for process in (*made.instances, made.trainer)} == {42.0}
    assert option(made.trainer.argv, "--stopped-after-s") == "42.0"


def test_on_two_cores_every_process_has_one_thread_and_a_log_of_its_own() -> None:
    made = plan(Path("c.toml"), make_config(), [], machine=Machine((0, 1)), ports=[8001, 8002])
    processes = [*made.instances, made.trainer]
    assert all(process.env["OMP_NUM_THREADS"] == "1" for process in processes)
    assert [str(process.log_file) for process in processes] == [
        f"runs/one/logs/{name}.log" for name in ("instance-0", "instance-1", "trainer")
    ]


def test_processes_are_kept_on_their_cores() -> None:
    made = plan(Path("c.toml"), make_config(), [], machine=Machine((0, 1, 2)), ports=[8001, 8002])
    assert [process.cores for process in made.instances] == [(0,), (1,)]
    assert made.trainer.cores == (2,)


def test_without_cores_nothing_is_pinned() -> None:
    made = plan(Path("c.toml"), make_config(), [], machine=Machine(), ports=[8001, 8002])
    assert [process.cores for process in (*made.instances, made.trainer)] == [(), (), ()]


def test_instances_that_run_elsewhere_are_refused() -> None:
    config = make_config(pool={"instances": ["http://other:8000"]})
    with pytest.raises(ConfigError, match=r"pool\.instances is \['http://other:8000'\]"):
        plan(Path("c.toml"), config, [], machine=Machine(), ports=[1, 2, 3])


def test_a_run_needs_a_port_for_each_instance() -> None:
    assert num_ports(make_config()) == 2


def test_instances_alone_take_no_device_for_a_trainer() -> None:
    config = make_config(trainer={"device": "cuda"}, inference={"engine": "vllm", "num_instances": 1})
    (process,), urls = plan_instances(config, machine=Machine((), ("7",)), ports=[8001])
    assert process.env["CUDA_VISIBLE_DEVICES"] == "7" and urls == ("http://127.0.0.1:8001",)


def test_a_plan_is_described_with_all_that_would_be_started() -> None:
    config = make_config(trainer={"device": "npu", "num_processes": 2}, inference={"engine": "vllm"})
    text = describe(plan(Path("c.toml"), config, [], machine=Machine(tuple(range(16)), ("0", "2", "5")), ports=[8001]))
    assert re.findall(r"^\S+", text, flags=re.MULTILINE) == ["instance-0", "trainer", "producer"]
    assert re.findall(r"devices  (.*)", text) == ["5", "0, 2"]
    assert "fleet endpoint: 127.0.0.1, a free one, see fleet.json; for the ranks: 127.0.0.1, a free one" in text
    assert "port     8001" in text and "log      runs/one/logs/trainer.log" in text
    assert re.search(
        r"command  OMP_NUM_THREADS=\d+ .*ASCEND_RT_VISIBLE_DEVICES=0,2 .* -m async_rl.trainer c.toml", text
    )


def test_torchrun_leaves_its_folders_in_the_run_and_not_in_tmp() -> None:
    local = plan(Path("c.toml"), make_config(), [], machine=Machine(), ports=[8001, 8002]).trainer.argv
    cluster = tuple(plan_cluster(Path("c.toml"), make_config(), []).training_argv(node_rank="0", master_address="h"))
    for argv in (local, cluster):
        assert option(argv, "--log-dir") == "runs/one/logs/torchrun"
        assert argv.index("--log-dir") < argv.index("async_rl.trainer"), "it is torchrun's option"


@pytest.mark.parametrize("pool", [{"instances": ["http://h:1"]}, {"instances": ["dns:instances:8000"]}])
def test_instances_elsewhere_are_not_mixed_with_those_of_this_launcher(pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"pool\.instances is .* remove the key"):
        plan(Path("c.toml"), make_config(pool=pool), [], machine=Machine(), ports=[8001, 8002])


@pytest.mark.parametrize(
    ("device", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_instances_see_the_main_ranks_device_last_where_they_map_its_memory(device: str, variable: str) -> None:
    def visible(**publish: str) -> list[str]:
        config = make_config(
            run={"dir": "runs/one", "placement": "shared"},
            publish=publish,
            trainer={"device": device, "num_processes": 4},
            inference={"engine": "vllm", "num_instances": 2, "tensor_parallel": 2},
        )
        made = plan(Path("c.toml"), config, [], machine=Machine((), ("4", "5", "6", "7")), ports=[8001, 8002])
        assert [process.devices for process in made.instances] == [("4", "5"), ("6", "7")]
        return [process.env[variable] for process in (*made.instances, made.trainer)]

    assert visible(transport="ipc") == ["4,5", "6,7,4", "4,5,6,7"]
    assert visible(transport="snapshot", snapshot_dir="/dev/shm/w") == ["4,5", "6,7", "4,5,6,7"]
