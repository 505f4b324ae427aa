"""The values of a run: its plan's own commands, and what a cluster must give."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.errors import ConfigError
from deploy.kubernetes.values import release_name
from inference_service.options import parse_options

VALUES = Callable[..., dict[str, Any]]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_release_is_called_as_the_run_in_the_letters_that_kubernetes_allows() -> None:
    assert release_name("Qwen3_0.6B run") == "qwen3-0-6b-run"
    assert re.fullmatch("grpo-[0-9a-f]{6}", release_name("2026-11-grpo"))
    assert len(release_name("x" * 100)) == 40 and not release_name("x" * 39 + "-y").endswith("-")
    # Helm would upgrade the release of the other run.
    for one, other in (("2026-11-01-grpo", "2026-11-02-grpo"), ("x" * 50 + "-1", "x" * 50 + "-2")):
        assert release_name(one) != release_name(other) and len(release_name(one)) <= 40
    with pytest.raises(ConfigError, match=r"'2026', which has no letter: name the release with --name"):
        release_name("2026")


def test_the_pods_find_rank_0_and_the_fleet_under_the_first_training_pods_name(values_of: VALUES) -> None:
    values = values_of({"cluster.training_nodes": 2, "cluster.python": "/opt/python"}, release="math")
    training, instance = values["training"]["command"], values["instances"]["command"]
    pod, torchrun = training[: training.index("--")], training[training.index("--") + 1 :]
    assert pod[:3] == ["/opt/python", "-m", "deploy.kubernetes.training_pod"]
    assert option(pod, "--index") == "$(JOB_COMPLETION_INDEX)" and option(pod, "--pods") == "2"
    assert torchrun[:3] == ["/opt/python", "-m", "async_rl.torchrun"]
    assert option(training, "--master-addr") == "math-trainer-0-0.math"
    assert option(training, "--node-rank") == "$(JOB_COMPLETION_INDEX)"
    assert option(torchrun, "--stopped-after-s") == "60.0", "of its ranks; instances have a livenessProbe"
    assert option(training, "--nnodes") == "2" == str(values["training"]["nodes"])
    assert "/etc/async-rl/run.toml" in training and "--cluster.training_nodes=2" in training
    assert option(instance, "--register") == "http://math-trainer-0-0.math:8600"
    assert option(instance, "--name") == "$(POD_NAME)"
    assert option(instance, "--port") == str(values["instances"]["port"])


def test_a_pod_takes_the_python_of_its_image(values_of: VALUES) -> None:
    values = values_of({"inference.engine": "vllm", "inference.python": "/opt/vllm/bin/python"})
    assert values["training"]["command"][0] == "python"
    assert values["instances"]["command"][0] == "/opt/vllm/bin/python"


@pytest.mark.parametrize(
    ("device", "resource", "scheduler"), [("cuda", "nvidia.com/gpu", None), ("npu", "huawei.com/Ascend910", "volcano")]
)
def test_each_worker_has_a_device_and_a_core_and_each_pod_one_core_more(
    values_of: VALUES, device: str, resource: str, scheduler: str | None
) -> None:
    values = values_of(
        {
            "trainer.device": device,
            "trainer.num_processes": 4,
            "inference.engine": "vllm",
            "inference.tensor_parallel": 2,
        }
    )
    assert values["training"]["resources"] == {"requests": {"cpu": "5"}, "limits": {resource: "4"}}
    assert values["instances"]["resources"] == {"requests": {"cpu": "3"}, "limits": {resource: "2"}}
    assert values["training"].get("schedulerName") == scheduler == values["instances"].get("schedulerName")


def test_an_instance_of_several_hosts_has_a_leader_with_the_api_and_workers_without(values_of: VALUES) -> None:
    asked = {
        "trainer.device": "cuda",
        "inference.engine": "vllm",
        "inference.tensor_parallel": 16,
        "inference.engine_options": '["--enforce-eager"]',
    }
    values = values_of(asked, hosts_per_instance=2)
    instances = values["instances"]
    assert instances["resources"] == {"requests": {"cpu": "9"}, "limits": {"nvidia.com/gpu": "8"}}
    leader, worker = instances["command"], instances["workerCommand"]
    assert leader[leader.index("--") + 1 :] == [
        *("--enforce-eager", "--nnodes", "2", "--master-addr", "$(LWS_LEADER_ADDRESS)", "--node-rank", "0")
    ]
    assert worker[-1] == "$(LWS_WORKER_INDEX)" and "--headless" in worker and "--register" not in worker
    with pytest.raises(ConfigError, match=r"--hosts-per-instance is 3, which does not divide .* = 16"):
        values_of(asked, hosts_per_instance=3)
    with pytest.raises(ConfigError, match="only vllm spans hosts"):
        values_of(hosts_per_instance=2)
    with pytest.raises(ConfigError, match="is 0 with --engine jobset: expected at least 1"):
        values_of(asked, hosts_per_instance=0)
    with pytest.raises(ConfigError, match=r"is 2 with --engine ray: .* more only with jobset"):
        values_of(asked, hosts_per_instance=2, engine="ray")
    alone = {**asked, "adapter.rank": 4, "adapter.publish": "adapters"}
    with pytest.raises(ConfigError, match=r"adapters are published alone, .* set adapter.publish to 'merged'"):
        values_of(alone, hosts_per_instance=2)


def test_a_range_of_instances_is_followed_by_an_autoscaler(values_of: VALUES) -> None:
    assert "autoscaling" not in values_of()
    values = values_of({"cluster.max_instances": 8, "inference.num_instances": 2})
    assert (values["instances"]["min"], values["instances"]["max"]) == (2, 8)
    assert values["autoscaling"] == {"enabled": True} == values["podMonitor"]


def test_the_token_is_in_no_value(values_of: VALUES, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_RL_TOKEN", "do-not-tell")
    assert "do-not-tell" not in str(values_of())


def test_instances_wait_without_limit_since_kubernetes_would_only_load_them_again(values_of: VALUES) -> None:
    command = values_of({})["instances"]["command"]
    assert parse_options(command[3:]).patience_s is None


def test_words_with_dollars_reach_the_programs_as_they_are(values_of: VALUES) -> None:
    values = values_of({"cluster.env": '{PRICE = "$(HOME) $$5"}'})
    assert values["training"]["env"]["PRICE"] == "$$(HOME) $$$$5"
    assert [word for word in values["training"]["command"] if word.startswith("$(")] == ["$(JOB_COMPLETION_INDEX)"] * 2
    overridden = next(word for word in values["training"]["command"] if word.startswith("--cluster.env="))
    assert "$$(HOME) $$$$5" in overridden
