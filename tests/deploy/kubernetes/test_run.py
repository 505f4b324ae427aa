"""A whole run from the rendered manifests: the pods' commands as processes, on hosts of their own."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.status import read_status
from tests.support.local_run import CONFIG, REWARD
from tests.support.pods import PodRunner, why_no_pods

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

FINISH_S = 300
REPLACED_AFTER = 4
LOST_AFTER = 10
FLEET = "http://grpo-trainer-0-0.grpo:8600"

OF_OTHER_RUNS = {"async_rl_kl", "async_rl_mfu", "async_rl_trainer_device_memory_peak_bytes"}
"""Metrics of a run with a reference, and of one on devices."""

CLUSTER = """
image: {trainer: trainer, instance: instance}
podMonitor: {enabled: true}
dashboard: {enabled: true}
"""


@pytest.fixture
def volume(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    """What users put on the claim before the run: model, rows and reward."""
    volume = tmp_path / "volume"
    shutil.copytree(tiny_model("qwen3", tied=True), volume / "model")
    (volume / "reward.py").write_text(REWARD)
    (volume / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"Word {i}: "}) + "\n" for i in range(40)))
    return volume


@pytest.fixture
def manifests(tmp_path: Path, launch: Callable[..., Any]) -> list[Any]:
    """As users get them: relative paths are on the volume."""
    config, cluster = tmp_path / "run.toml", tmp_path / "cluster.yaml"
    config.write_text(CONFIG.format(run_dir="grpo", model="model", data="rows.jsonl", reward="reward.py"))
    cluster.write_text(CLUSTER)
    options = ["--inference.num_instances=2", "--train.iterations=30", "--pool.timeout_s=120", "--checkpoint.every=3"]
    done = launch(config, "--values", cluster, "--dry-run", *options)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@pytest.fixture
def runner(manifests: list[Any], volume: Path, tmp_path: Path) -> Iterator[PodRunner]:
    reason = why_no_pods()
    if reason is not None:
        pytest.skip(reason)
    runner = PodRunner(manifests, volume, tmp_path)
    yield runner
    runner.close()


def test_the_pods_of_a_release_train_a_proven_run_though_the_trainers_is_lost_and_an_instance_replaced(
    runner: PodRunner, volume: Path, manifests: list[Any]
) -> None:
    *instances, trainer = runner.pods
    assert [pod.dns for pod in runner.pods] == [
        "grpo-instance-0.grpo-instance",
        "grpo-instance-1.grpo-instance",
        "grpo-trainer-0-0.grpo",
    ]
    for pod in runner.pods:
        runner.start(pod)

    def everything_said() -> str:
        return "\n".join(f"--- {pod.name}\n{runner.log(pod)}" for pod in runner.pods)

    # The metrics as Prometheus gets them, without the token.
    [monitor] = [each["spec"] for each in manifests if each["kind"] == "PodMonitor"]
    [endpoint] = monitor["podMetricsEndpoints"]
    [dashboard] = [each["data"]["async-rl.json"] for each in manifests if each["metadata"]["name"] == "grpo-dashboard"]
    ledger = volume / "grpo" / "ledger.jsonl"
    deadline, metrics, status, num_replaced = time.monotonic() + FINISH_S, "", "", 0
    while runner.running[trainer.name].poll() is None:
        assert time.monotonic() < deadline, everything_said()
        for pod in instances:
            assert runner.running[pod.name].poll() is None, everything_said()
        num_trained = len(ledger.read_text().splitlines()) if ledger.exists() else 0
        if num_replaced == 0 and num_trained >= REPLACED_AFTER:
            # As an upgrade of the instances does with one pod after the other.
            runner.running[instances[1].name].terminate()
            assert runner.running[instances[1].name].wait(instances[1].spec["terminationGracePeriodSeconds"]) == 0
            num_replaced += 1
            runner.start_again(instances[1])
        if runner.attempt == 0 and num_trained >= LOST_AFTER:
            runner.lose(trainer)
            runner.attempt = 1
            runner.start_again(trainer)
            metrics = ""
        metrics = runner.get(trainer, endpoint["port"], endpoint["path"]) or metrics
        # The trainer listens before the instances have registered again.
        if runner.attempt == 1 and all(pod.name in metrics for pod in instances) and not status:
            # As `kubectl exec job/grpo-trainer-0 -- async-rl status --run grpo`.
            status = runner.ask(trainer, "-m", "deploy.status", "--run", "grpo", "--json")
        time.sleep(0.5)
    assert runner.running[trainer.name].returncode == 0, everything_said()
    shown = set(re.findall(r"async_rl_\w+", json.dumps(json.loads(dashboard)["panels"])))
    assert {name for name in shown if name not in metrics} == OF_OTHER_RUNS, metrics

    proofs = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [proof["iteration"] for proof in proofs] == list(range(30))
    assert all(proof["on_policy"] and proof["num_responses"] == 24 for proof in proofs), proofs
    records = [json.loads(line) for line in (volume / "grpo" / "metrics.jsonl").read_text().splitlines()]
    # One starts alone where the other one registers later.
    assert max(record["num_instances"] for record in records) == 2, everything_said()
    assert (volume / "grpo" / "model" / "config.json").exists()

    now = json.loads(status)
    [task] = now["tasks"]
    assert (now["engine"], task["state"], task["restarts"], task["id"]) == ("kubernetes", "running", 1, trainer.name)
    assert task["cause"] == f"{trainer.name} ended without a word: the pod or its node was lost"
    assert {each["name"] for each in now["fleet"]["instances"]} == {pod.name for pod in instances}
    assert read_status(volume / "grpo", None).tasks[0].state == "done"

    for pod in instances:
        assert f"registered with the fleet at {FLEET} as {pod.name}" in runner.log(pod), everything_said()
        [container] = pod.spec["containers"]
        probe = container["startupProbe"]["httpGet"]
        assert runner.get(pod, probe["port"], probe["path"]).startswith("200"), everything_said()
        # As the kubelet does when the release is uninstalled.
        runner.running[pod.name].terminate()
    for pod in instances:
        assert runner.running[pod.name].wait(pod.spec["terminationGracePeriodSeconds"]) == 0, everything_said()
