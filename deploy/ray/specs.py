"""The groups of a plan: what is asked of Ray, and what each task runs once its host is known. Pure."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from async_rl.shared.net.http_client import http_url
from deploy.cluster.plan import ClusterPlan, Resources
from deploy.cluster.process import Process, log_path, stopped_after_s
from deploy.ray.groups import GroupSpec, Node

RESOURCE_OF = {"cuda": "GPU", "npu": "NPU"}
"""Ray's name of a kind of device; Ray makes the devices of a task visible to it by itself."""

TRAINING = "training"

NUM_PORTS = 2
"""Free ports that a task's host is asked for: two for the first training task, one for an instance."""

UNKNOWN = Node("HOST", "ADDRESS", (0, 0))
"""Stands for a host in what `--dry-run` prints."""


def instance_name(index: int) -> str:
    return f"instance-{index}"


def bundle(resources: Resources) -> dict[str, float]:
    """What one task asks of Ray."""
    devices = {RESOURCE_OF[resources.kind]: float(resources.devices)} if resources.devices else {}
    return {"CPU": float(resources.cores), **devices}


def training_group(plan: ClusterPlan) -> GroupSpec:
    """One torchrun on each training node. They meet at the first one's address, at a port that is free there."""
    names = tuple(f"trainer-{rank}" for rank in range(plan.num_nodes))

    def processes(nodes: Sequence[Node]) -> list[Process]:
        first = nodes[0]
        master_port, fleet_port = first.ports
        here = replace(plan, master_port=master_port, fleet_port=plan.config.pool.fleet_port or fleet_port)
        # Only in the network of the cluster, not at all addresses of the host.
        at = f"--pool.fleet_address={urlsplit(http_url(first.address, here.fleet_port)).netloc}"
        return [
            Process(
                name,
                "trainer",
                (*here.training_argv(node_rank=str(rank), master_address=first.address), at),
                log_path(run_dir(plan), name),
                env=plan.env,
                grace_s=plan.training_grace_s,
                stopped_after_s=_stopped_after_s(plan),
            )
            for rank, name in enumerate(names)
        ]

    return GroupSpec(TRAINING, names, plan.node, plan.training_grace_s, processes)


def instance_group(plan: ClusterPlan, name: str) -> GroupSpec:
    """One instance. It finds the trainer by the run's directory, so it follows one that starts again elsewhere."""

    def processes(nodes: Sequence[Node]) -> list[Process]:
        argv = tuple(plan.instance_argv(name=name, port=nodes[0].ports[0], register=str(run_dir(plan))))
        log = log_path(run_dir(plan), name)
        env, grace_s, limit_s = plan.env, plan.instance_grace_s, _stopped_after_s(plan)
        return [Process(name, "instance", argv, log, env=env, grace_s=grace_s, stopped_after_s=limit_s)]

    return GroupSpec(name, (name,), plan.instance, plan.instance_grace_s, processes)


def run_dir(plan: ClusterPlan) -> Path:
    """The run's directory as all hosts see it."""
    return plan.config.run.dir.absolute()


def describe(plan: ClusterPlan) -> str:
    """What would be asked of Ray and run, as text: addresses and ports are known when hosts are."""
    lines = []
    instances = [instance_group(plan, instance_name(i)) for i in range(plan.min_instances)]
    for spec in (training_group(plan), *instances):
        strategy = "STRICT_SPREAD" if len(spec.names) > 1 else "PACK"
        lines.append(f"placement group {spec.name}: {strategy} {[bundle(spec.resources)] * len(spec.names)}")
        for process in spec.processes([UNKNOWN] * len(spec.names)):
            env = " ".join(f"{key}={value}" for key, value in process.env.items())
            lines += [
                f"  {process.name}",
                f"    log      {process.log_file}",
                f"    env      {env}",
                f"    command  {' '.join(map(_quoted, process.argv))}",
            ]
    if plan.max_instances > plan.min_instances:
        lines.append(f"and up to {plan.max_instances} instances in all, as async_rl_desired_instances asks for them")
    lines.append("rank 0, in trainer-0, starts the producer beside it, which opens the fleet endpoint at its host")
    lines.append("Ray chooses hosts, hence each ADDRESS and the ports that are 0 here")
    return "\n".join(lines)


def _stopped_after_s(plan: ClusterPlan) -> float:
    return stopped_after_s(plan.config.trainer.lost_after_s)


def _quoted(word: str) -> str:
    return json.dumps(word) if " " in word else word
