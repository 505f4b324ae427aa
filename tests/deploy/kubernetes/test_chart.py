"""The chart: every object it makes is one that Kubernetes accepts, and what a typo in the values or templates does."""

import copy
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.config.file import load_config
from deploy.kubernetes.__main__ import CHART
from deploy.kubernetes.training_pod import MAY_PASS
from tests.support.parts import needs_part
from tests.support.strict_schema import check

pytestmark = pytest.mark.distributed

HERE = Path(__file__).parent

CUDA = {"trainer.device": "cuda", "inference.engine": "vllm"}
CASES: Mapping[str, tuple[dict[str, object], dict[str, Any]]] = {
    "cpu": ({}, {}),
    "cuda": ({**CUDA, "trainer.num_processes": 4, "inference.tensor_parallel": 2}, {}),
    "ascend": ({"trainer.device": "npu", "inference.engine": "vllm"}, {}),
    "multi_node": ({**CUDA, "cluster.training_nodes": 2, "inference.tensor_parallel": 16}, {"hosts_per_instance": 2}),
    "elastic": ({"cluster.max_instances": 12}, {}),
    "ray": ({"cluster.max_instances": 3}, {"engine": "ray"}),
}
"""The config's overrides and the launcher's options, for each file of `values/`."""

KINDS = {
    "cpu": "ConfigMap JobSet NetworkPolicy PersistentVolumeClaim Secret Service StatefulSet",
    "cuda": "ConfigMap ConfigMap JobSet NetworkPolicy PodMonitor Service StatefulSet",
    "ascend": "ConfigMap JobSet NetworkPolicy Secret Service StatefulSet",
    "multi_node": "ConfigMap JobSet LeaderWorkerSet NetworkPolicy Secret",
    "elastic": "ConfigMap ConfigMap JobSet NetworkPolicy PersistentVolumeClaim PodMonitor ScaledObject Secret Service "
    "StatefulSet",
    "ray": "ConfigMap NetworkPolicy NetworkPolicy PersistentVolumeClaim PodMonitor RayJob Secret",
}


@pytest.fixture
def objects_of(values_of: Callable[..., Any], render: Callable[..., Any]) -> Callable[[str], list[Any]]:
    def objects(case: str) -> list[Any]:
        overrides, options = CASES[case]
        return list(render(values_of(overrides, **options), case))

    return objects


def one(objects: list[Any], kind: str) -> Any:
    [found] = [each for each in objects if each["kind"] == kind]
    return found


def pod_specs(thing: Any) -> list[Any]:
    if isinstance(thing, list):
        return [spec for part in thing for spec in pod_specs(part)]
    if not isinstance(thing, dict):
        return []
    return [thing] if "containers" in thing else [spec for part in thing.values() for spec in pod_specs(part)]


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_one_that_kubernetes_knows(case: str, objects_of: Callable[[str], list[Any]]) -> None:
    objects = objects_of(case)
    assert sorted(each["kind"] for each in objects) == KINDS[case].split()
    for each in objects:
        check(each)


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_wrong(case: str, helm: Path, values_of: Callable[..., Any], tmp_path: Path) -> None:
    overrides, options = CASES[case]
    generated = tmp_path / "values.json"
    generated.write_text(json.dumps(values_of(overrides, **options)))
    files = ["--values", str(generated), "--values", str(HERE / "values" / f"{case}.yaml")]
    done = subprocess.run([helm, "lint", "--strict", CHART, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_strict_check_finds_a_typo_anywhere(objects_of: Callable[[str], list[Any]]) -> None:
    def misspelt(thing: Any, *path: str | int) -> Any:
        wrong = copy.deepcopy(thing)
        place = wrong
        for key in path:
            place = place[key]
        place["misspelt"] = 1
        return wrong

    elastic = objects_of("elastic")
    job = ("spec", "replicatedJobs", 0, "template", "spec")
    wrong = [
        misspelt(one(elastic, "JobSet"), "spec"),
        misspelt(one(elastic, "JobSet"), "spec", "failurePolicy", "rules", 0),
        misspelt(one(elastic, "JobSet"), *job),
        misspelt(one(elastic, "JobSet"), *job, "podFailurePolicy", "rules", 0),
        misspelt(one(elastic, "JobSet"), *job, "template", "spec", "containers", 0),
        misspelt(one(elastic, "ScaledObject"), "spec", "scaleTargetRef"),
        misspelt(one(elastic, "PodMonitor"), "spec", "podMetricsEndpoints", 0),
        misspelt(one(elastic, "StatefulSet"), "spec", "template", "spec", "containers", 0, "startupProbe"),
        misspelt(one(elastic, "NetworkPolicy"), "spec", "ingress", 0),
        misspelt(one(objects_of("multi_node"), "LeaderWorkerSet"), "spec", "leaderWorkerTemplate"),
        misspelt(one(objects_of("ray"), "RayJob"), "spec", "rayClusterSpec", "workerGroupSpecs", 1),
    ]
    for each in wrong:
        with pytest.raises(Exception, match="misspelt"):
            check(each)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainig": {}}, "trainig"),
        ({"image": {"trainer": "", "instance": "x"}}, "/image/trainer"),
        ({"instances": {"env": {"ASYNC_RL_TOKEN": "secret"}}}, "ASYNC_RL_TOKEN"),
        ({"run": {"dir": "/elsewhere/run"}}, "which is not on the volume"),
        ({"instances": {"max": 3}}, "nothing scales between them"),
        ({"autoscaling": {"enabled": True}}, "podMonitor.enabled is false"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_values_that_cannot_work_are_refused(
    values_of: Callable[..., Any], render: Callable[..., Any], change: dict[str, Any], said: str
) -> None:
    values = values_of()
    # As a last file does: sections are merged.
    more = {key: {**values.get(key, {}), **part} if isinstance(part, dict) else part for key, part in change.items()}
    cluster = yaml.safe_load((HERE / "values" / "cpu.yaml").read_text())
    with pytest.raises(ValueError, match=re.escape(said)):
        render(values | more, "cpu", *(["--set", "image.trainer="] if "image" in change else []))
    assert cluster["image"]["trainer"], "the file itself is complete"


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted(case: str, objects_of: Callable[[str], list[Any]]) -> None:
    """Pod Security Standards, profile restricted, and a root file system that cannot be written."""
    specs = pod_specs(objects_of(case))
    assert specs
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        writable = {each["name"] for each in spec["volumes"] if "emptyDir" in each}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            assert {mounts["/tmp"], mounts["/dev/shm"]} == writable
            assert {each["name"]: each.get("value") for each in container["env"]}["HOME"] == "/tmp"


@pytest.mark.parametrize("case", CASES)
def test_pods_get_the_token_from_the_secret_alone(case: str, objects_of: Callable[[str], list[Any]]) -> None:
    objects = objects_of(case)
    made = [each for each in objects if each["kind"] == "Secret"]
    for container in (container for spec in pod_specs(objects) for container in spec["containers"]):
        [token] = [each for each in container["env"] if each["name"] == "ASYNC_RL_TOKEN"]
        asked = token["valueFrom"]["secretKeyRef"]
        assert asked == {"name": made[0]["metadata"]["name"] if made else "our-token", "key": "token"}
    for secret in made:
        assert len(secret["data"]["token"]) > 40


def test_the_network_policy_selects_all_pods_of_the_release_and_no_others(
    objects_of: Callable[[str], list[Any]],
) -> None:
    objects = objects_of("cuda")
    policy = one(objects, "NetworkPolicy")["spec"]
    selector = policy["podSelector"]["matchLabels"]
    templates = [
        one(objects, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"],
        one(objects, "StatefulSet")["spec"]["template"],
    ]
    for template in templates:
        assert selector.items() <= template["metadata"]["labels"].items()
    assert selector["app.kubernetes.io/instance"] == "run"
    own, metrics = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": selector}}]}, "at all ports"
    assert metrics["ports"] == [{"protocol": "TCP", "port": 8600}]
    to_own, names, more = policy["egress"]
    assert to_own == {"to": [{"podSelector": {"matchLabels": selector}}]}, "at all ports"
    assert names == {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    assert more == {"ports": [{"protocol": "TCP", "port": 443}]}, "what the cluster's values add"


def test_training_pods_are_started_again_unless_their_exit_code_says_that_it_would_not_help(
    objects_of: Callable[[str], list[Any]],
) -> None:
    spec = one(objects_of("multi_node"), "JobSet")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (2, 2, 0)
    lasting, other = spec["failurePolicy"]["rules"]
    assert (lasting["action"], lasting["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # The first pod counts them, by the number that JobSet gives to each attempt.
    assert other == {"name": "may-pass", "action": "RestartJobSetAndIgnoreMaxRestarts"}
    actions = [(each["action"], each.get("onExitCodes", {}).get("values")) for each in job["podFailurePolicy"]["rules"]]
    assert actions == [("Ignore", None), ("Ignore", [5]), ("FailJob", [MAY_PASS, 137, 143])]
    assert job["podFailurePolicy"]["rules"][2]["onExitCodes"]["operator"] == "NotIn"
    [container] = job["template"]["spec"]["containers"]
    fields = {each["name"]: each["valueFrom"].get("fieldRef", {}) for each in container["env"] if "valueFrom" in each}
    assert fields["RESTART_ATTEMPT"] == {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}
    assert container["name"] == "trainer" == job["podFailurePolicy"]["rules"][2]["onExitCodes"]["containerName"]


def test_instances_have_the_time_to_leave_and_are_probed_for_health_alone(
    objects_of: Callable[[str], list[Any]],
) -> None:
    spec = one(objects_of("cpu"), "StatefulSet")["spec"]["template"]["spec"]
    # inference_service/address.py: 30 s for the fleet to let it go.
    assert spec["terminationGracePeriodSeconds"] > 30
    [container] = spec["containers"]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert probes == [{"path": "/health", "port": "http"}] * 3
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


def test_the_autoscaler_alone_sets_the_number_of_instances(objects_of: Callable[[str], list[Any]]) -> None:
    objects = objects_of("elastic")
    assert "replicas" not in one(objects, "StatefulSet")["spec"]
    scaled = one(objects, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one(objects, "StatefulSet")["metadata"]["name"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 12)
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["query"].startswith("max(async_rl_desired_instances{")
    monitored = one(objects, "PodMonitor")["spec"]
    pods = one(objects, "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    own = dict(monitored["selector"]["matchLabels"])
    assert own.pop("batch.kubernetes.io/job-completion-index") == "0", "Kubernetes sets it"
    assert own.items() <= pods["metadata"]["labels"].items()
    ports = {each["name"]: each["containerPort"] for each in pods["spec"]["containers"][0]["ports"]}
    assert ports[monitored["podMetricsEndpoints"][0]["port"]] == 8600


@needs_part("ray")
def test_the_entrypoint_of_a_ray_job_is_a_command_of_the_launcher_with_the_port_that_is_monitored(
    objects_of: Callable[[str], list[Any]], tmp_path: Path
) -> None:
    from deploy.ray import __main__ as ray_launcher

    objects = objects_of("ray")
    job = one(objects, "RayJob")["spec"]
    python, dash, module, path, *words = shlex.split(job["entrypoint"])
    assert (python, dash, module) == ("python", "-m", ray_launcher.__name__.removesuffix(".__main__"))
    assert path == "/etc/async-rl/run.toml"
    config = tmp_path / "run.toml"
    config.write_text(one(objects, "ConfigMap")["data"]["run.toml"])
    parser = ray_launcher.make_parser()
    parser.parse_args([str(config), *words])
    loaded = load_config(config, parser.overrides)
    assert loaded.cluster.max_instances == 3
    [trainer] = [each for each in job["rayClusterSpec"]["workerGroupSpecs"] if each["groupName"] == "trainer"]
    [container] = trainer["template"]["spec"]["containers"]
    monitored = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"]
    assert {"name": monitored, "containerPort": loaded.pool.fleet_port} in container["ports"]
