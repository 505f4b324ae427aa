"""From the plan of a run to the values of the chart: pure data. The chart's `values.yaml` describes each of them.

Every command of the chart is the plan's own.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.cluster.plan import ANY_HOST, ClusterPlan, Resources

CONFIG_PATH: Final = Path("/etc/async-rl/run.toml")
"""Where the chart mounts the config."""

INSTANCE_PORT: Final = 8000

DEVICE_RESOURCE: Final = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}

SCHEDULERS: Final = {"npu": "volcano"}
"""Plain Kubernetes counts Ascend chips without regard to their connections; volcano's plugin knows them."""

INDEX: Final = "$(JOB_COMPLETION_INDEX)"
POD: Final = "$(POD_NAME)"
LEADER: Final = "$(LWS_LEADER_ADDRESS)"
WORKER: Final = "$(LWS_WORKER_INDEX)"
VARIABLES: Final = frozenset({INDEX, POD, LEADER, WORKER})
"""Words that Kubernetes replaces by the variable of that name."""

MAX_NAME: Final = 40
"""Characters of a release; Kubernetes allows 63 in the names of the pods and Jobs made from it."""

NAME_DIGITS: Final = 6
"""Of a digest in such a name."""

ENGINES: Final = ("jobset", "ray")


def release_name(run_name: str) -> str:
    """The name of a run as a name in Kubernetes: lower case letters, digits and dashes, the first a letter.

    Where something is cut off, such as a date at its front, a digest of the whole name tells it from other runs: a
    release of the same name would be upgraded.

    Raises:
        ConfigError: nothing is left of it.
    """
    whole = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    name = whole.lstrip("-0123456789")
    if not name:
        raise ConfigError(f"run.dir ends in {run_name!r}, which has no letter: name the release with --name")
    if name == whole and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(whole.encode()).hexdigest()[:NAME_DIGITS]
    return f"{name[: MAX_NAME - NAME_DIGITS - 1].strip('-')}-{digest}"


def for_pods(config: Config) -> Config:
    """The config as its pods use it: `python` of their image unless another one is set."""
    cluster = config.cluster.model_copy(update={"python": config.cluster.python or "python"})
    return config.model_copy(update={"cluster": cluster})


FOR_EVER = 0.0
"""The patience of instances: one that ended would be started again, and load its model again. Kubernetes keeps the
number of pods, and their devices, until somebody changes it."""


def chart_values(
    plan: ClusterPlan, config_text: str, *, release: str, engine: str = "jobset", hosts_per_instance: int = 1
) -> dict[str, Any]:
    """The values that a run sets.

    Args:
        plan: made from `for_pods(config)`.
        config_text: the config's TOML, which all training pods read at `CONFIG_PATH`.
        release: the name of the Helm release, from which the pods' names follow.
        engine: one of `ENGINES`.
        hosts_per_instance: pods that share one instance.

    Raises:
        ConfigError: the config asks for what the chart does not do.
    """
    plan = replace(plan, config_path=CONFIG_PATH)
    _require_possible(plan.config, engine, hosts_per_instance)
    first_host = f"{release}-trainer-0-0.{release}"
    argv = plan.training_argv(node_rank=INDEX, master_address=first_host)
    values: dict[str, Any] = {
        "engine": engine,
        "run": {"dir": str(plan.config.run.dir), "config": config_text, "fleetPort": plan.fleet_port},
        "training": {
            "nodes": plan.num_nodes,
            "command": _literal([*_training_pod(plan, argv[0], release), "--", *argv]),
            "env": _literal_env(plan.env),
            "ports": {"master": plan.master_port},
            "gracePeriodSeconds": round(plan.training_grace_s),
            **_demand(plan.node, 1),
        },
        "instances": {
            "min": plan.min_instances,
            "max": plan.max_instances,
            "hosts": hosts_per_instance,
            **_instance_commands(plan, f"http://{first_host}:{plan.fleet_port}", hosts_per_instance),
            "env": _literal_env(plan.env),
            "port": INSTANCE_PORT,
            "gracePeriodSeconds": round(plan.instance_grace_s),
            **_demand(plan.instance, hosts_per_instance),
        },
    }
    if plan.max_instances > plan.min_instances and engine == "jobset":
        values |= {"autoscaling": {"enabled": True}, "podMonitor": {"enabled": True}}
    if engine == "ray":
        python = plan.config.cluster.python or "python"
        # Ray would take a free port; each pod has all of its own, and Prometheus must know this one.
        address = f"--pool.fleet_address={ANY_HOST}:{plan.fleet_port}"
        command = [python, "-m", "deploy.ray", str(CONFIG_PATH), *plan.overrides, address]
        values["ray"] = {"command": command, "backoffLimit": plan.config.cluster.max_restarts}
    return values


def _training_pod(plan: ClusterPlan, python: str, release: str) -> list[str]:
    cluster = plan.config.cluster
    options: Mapping[str, object] = {
        "--run-dir": plan.config.run.dir,
        "--pods": plan.num_nodes,
        "--index": INDEX,
        "--instances": f"http://{release}-instance:{INSTANCE_PORT}",
        "--max-restarts": cluster.max_restarts,
    }
    words = [str(word) for option in options.items() for word in option]
    return [python, "-m", "deploy.kubernetes.training_pod", *words]


def _literal(words: Iterable[str]) -> list[str]:
    """Words of which Kubernetes replaces the chart's own variables and nothing else: it reads `$$` as `$`."""
    return [word if word in VARIABLES else word.replace("$", "$$") for word in words]


def _literal_env(env: Mapping[str, str]) -> dict[str, str]:
    return dict(zip(env, _literal(env.values()), strict=True))


def _require_possible(config: Config, engine: str, hosts: int) -> None:
    if hosts == 1:
        return
    if hosts < 1 or engine != "jobset":
        raise ConfigError(
            f"--hosts-per-instance is {hosts} with --engine {engine}: expected at least 1, and more only with jobset"
        )
    if config.inference.engine != "vllm":
        raise ConfigError(
            f"--hosts-per-instance is {hosts}, but inference.engine is {config.inference.engine!r}: "
            "only vllm spans hosts"
        )
    if config.inference.tensor_parallel % hosts:
        raise ConfigError(
            f"--hosts-per-instance is {hosts}, which does not divide inference.tensor_parallel = "
            f"{config.inference.tensor_parallel}: each host has the same number of an instance's workers"
        )
    if config.publishes_adapters:
        raise ConfigError(
            f"--hosts-per-instance is {hosts}, but adapters are published alone, which vLLM loads from a directory of "
            "one host: set adapter.publish to 'merged'"
        )


def _demand(resources: Resources, hosts: int) -> dict[str, Any]:
    """Requests, limits and scheduler of one pod, of `hosts` that share the resources."""
    demand: dict[str, Any] = {"requests": {"cpu": str(-(-resources.cores // hosts))}}
    if resources.devices:
        demand["limits"] = {DEVICE_RESOURCE[resources.kind]: str(resources.devices // hosts)}
    scheduler = SCHEDULERS.get(resources.kind)
    return {"resources": demand, **({"schedulerName": scheduler} if scheduler else {})}


def _instance_commands(plan: ClusterPlan, register: str, hosts: int) -> Mapping[str, list[str]]:
    """The command of an instance; of one that spans hosts, also that of its other hosts."""
    if hosts == 1:
        return {
            "command": _literal(
                plan.instance_argv(name=POD, port=INSTANCE_PORT, register=register, patience_s=FOR_EVER)
            )
        }
    together = ("--nnodes", str(hosts), "--master-addr", LEADER, "--node-rank")
    options = plan.config.inference.engine_options
    argv = _with_engine_options(plan, (*options, *together, "0")).instance_argv(
        name=POD, port=INSTANCE_PORT, register=register, patience_s=FOR_EVER
    )
    # Without API server and registration: workers of the leader's engine, with the same transport of weights.
    inference, model = plan.config.inference, plan.config.model
    max_len = plan.config.max_model_len
    worker = [
        *(argv[0], "-m", "vllm.entrypoints.cli.main", "serve", model.path, "--headless"),
        *("--dtype", model.dtype, "--tensor-parallel-size", str(inference.tensor_parallel)),
        *("--max-num-seqs", str(inference.max_concurrency)),
        *(() if max_len is None else ("--max-model-len", str(max_len))),
        *("--weight-transfer-config", '{"backend": "async_rl"}'),
        *("--worker-extension-cls", "inference_service.vllm.worker.WorkerExtension"),
        *(*options, *together, WORKER),
    ]
    return {"command": _literal(argv), "workerCommand": _literal(worker)}


def _with_engine_options(plan: ClusterPlan, options: tuple[str, ...]) -> ClusterPlan:
    inference = plan.config.inference.model_copy(update={"engine_options": options})
    return replace(plan, config=plan.config.model_copy(update={"inference": inference}))
