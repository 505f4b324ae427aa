"""From a config to the processes of a run: pure data, nothing is started. Called by every launcher.

The launcher passes the machine's cores, devices and ports, so the same inputs always give the same plan;
`deploy.local.machine_shares` divides them.
"""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.cluster.plan import instance_command, process_environment, require_engine_for_device
from deploy.cluster.process import GRACE_S, Process, log_path, stopped_after_s, torchrun_dir
from deploy.local.machine import HOST, VISIBLE, Machine
from deploy.local.machine_shares import Share, share_out


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run; `urls[i]` is the URL of `instances[i]`.

    The trainer starts one more, the producer, which opens the fleet endpoint.
    """

    instances: tuple[Process, ...]
    trainer: Process
    urls: tuple[str, ...]
    fleet_host: str
    fleet_port: int


def num_ports(config: Config) -> int:
    """Number of free ports that `plan` needs: one per instance."""
    return config.inference.num_instances


def plan(
    config_path: Path,
    config: Config,
    overrides: Sequence[str],
    *,
    machine: Machine,
    ports: Sequence[int],
    program: Sequence[str] = ("async_rl.trainer",),
) -> Plan:
    """The processes of a run on one host.

    Args:
        config_path: the TOML file `config` was read from; the trainer reads it again.
        config: the loaded config, overrides applied.
        overrides: the `--section.key=value` words it was loaded with, passed on to the trainer.
        machine: cores and devices to share among the processes.
        ports: `num_ports(config)` free TCP ports of the loopback interface.
        program: the module that the training ranks run, and its first arguments.

    Raises:
        ConfigError: `pool.instances` is set (instances run elsewhere), the trainer needs several hosts,
            or the machine lacks the requested resources.
    """
    if config.pool.instances:
        raise ConfigError(
            f"pool.instances is {list(config.pool.instances)}, but this launcher "
            f"starts its own {config.inference.num_instances}: remove the key, or start the trainer alone with "
            "torchrun -m async_rl.trainer"
        )
    if config.cluster.training_nodes > 1:
        raise ConfigError(
            f"cluster.training_nodes is {config.cluster.training_nodes}, but this launcher starts everything on this "
            "host: set it to 1, or start the run with async-rl launch"
        )
    require_engine_for_device(config)
    shares, trainer_share = share_out(config, machine)
    instances, urls = _instances(config, shares, ports, asleep=config.run.placement == "turns")
    trainer = _trainer(config_path, config, overrides, urls, trainer_share, program)
    return Plan(instances, trainer, urls, config.pool.fleet_host, config.pool.fleet_port)


def plan_instances(
    config: Config, *, machine: Machine, ports: Sequence[int]
) -> tuple[tuple[Process, ...], tuple[str, ...]]:
    """Instances alone, as `async-rl eval` starts them, and their URLs.

    Raises:
        ConfigError: the machine lacks the requested resources.
    """
    require_engine_for_device(config)
    return _instances(config, share_out(config, machine, with_trainer=False)[0], ports, asleep=False)


def describe(plan: Plan) -> str:
    """A plan as text: the processes, their resources and commands."""
    lines = []
    for process in (*plan.instances, plan.trainer):
        lines += [
            f"{process.name}",
            f"  cores    {', '.join(map(str, process.cores)) or 'any'}",
            f"  threads  {process.env['OMP_NUM_THREADS']}",
            f"  devices  {', '.join(process.devices) or 'CPU'}",
            f"  log      {process.log_file}",
            f"  command  {shlex.join([*(f'{key}={value}' for key, value in process.env.items()), *process.argv])}",
        ]
        if process.role == "instance":
            lines.insert(-1, f"  port     {process.argv[process.argv.index('--port') + 1]}")
    lines += [
        "producer",
        "  started  by training rank 0, beside it, and again when it is lost",
        f"  log      {plan.trainer.log_file}",
        f"  ports    fleet endpoint: {plan.fleet_host}, {plan.fleet_port or 'a free one, see fleet.json'}; for the "
        f"ranks: {HOST}, a free one",
    ]
    return "\n".join(lines)


def _instances(
    config: Config, shares: Sequence[Share], ports: Sequence[int], *, asleep: bool
) -> tuple[tuple[Process, ...], tuple[str, ...]]:
    assert len(ports) == len(shares), f"{len(ports)} ports for {len(shares)} instances"
    processes = tuple(
        _instance(config, i, port, share, asleep=asleep)
        for i, (port, share) in enumerate(zip(ports, shares, strict=True))
    )
    return processes, tuple(f"http://{HOST}:{port}" for port in ports)


def _instance(config: Config, index: int, port: int, share: Share, *, asleep: bool) -> Process:
    python, switches = config.inference.python or sys.executable, ["--asleep"] if asleep else []
    argv = instance_command(config, python, HOST, port, *switches)
    return _process(config, f"instance-{index}", "instance", argv, share)


def _trainer(
    config_path: Path,
    config: Config,
    overrides: Sequence[str],
    urls: Sequence[str],
    share: Share,
    program: Sequence[str],
) -> Process:
    limit_s = stopped_after_s(config.trainer.lost_after_s)
    argv = [
        *(sys.executable, "-m", "async_rl.torchrun"),
        # torchrun chooses the port of its rendezvous itself, so no other process can take it in between.
        *("--standalone", "--local-addr", HOST, "--nproc-per-node", str(config.trainer.num_local_ranks)),
        *("--shutdown-timeout", str(math.ceil(config.checkpoint.grace_s + GRACE_S))),
        *("--log-dir", str(torchrun_dir(config.run.dir)), "--stopped-after-s", str(limit_s)),
        *("-m", *program, str(config_path), *overrides),
        *("--pool.instances", json.dumps(list(urls))),
    ]
    # The trainer ends by itself within its own grace time; torchrun waits longer, and the launcher longest.
    process = _process(config, "trainer", "trainer", argv, share)
    return replace(process, grace_s=config.checkpoint.grace_s + 2 * GRACE_S)


def _process(
    config: Config, name: str, role: Literal["instance", "trainer"], argv: Sequence[str], share: Share
) -> Process:
    env = process_environment(share.threads)
    if share.devices:
        env[VISIBLE[config.trainer.device]] = ",".join(dict.fromkeys(share.devices + share.seen))
    log, limit_s = log_path(config.run.dir, name), stopped_after_s(config.trainer.lost_after_s)
    return Process(name, role, tuple(argv), log, share.cores, env, share.devices, stopped_after_s=limit_s)
