"""From a config to the tasks of a run on a cluster: pure data. `deploy.{ray,slurm,kubernetes}` submit it.

A run is `num_nodes` training tasks, each torchrun with the ranks of one host, and between `min_instances` and
`max_instances` instance tasks, each one instance that registers itself with the trainer. Where a task runs is decided
by the cluster, so addresses are arguments here; they may also be variables that the cluster's shell expands.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from deploy.cluster.process import GRACE_S, stopped_after_s, torchrun_dir

FLEET_PORT = 8600
"""Of the trainer's fleet endpoint, where `pool.fleet_address` leaves it open: instances know it before it listens."""

MASTER_PORT = 29500
"""Where the training nodes meet, on the first of them: torchrun's own; beside a fleet endpoint at a port of the user's
choice the next one, since what has taken the one port there may have taken the other."""

LAST_PORT = 65535

PATIENCE_S = 1800.0
"""How long an instance waits for a trainer before it ends: a restart takes minutes, a queue perhaps half an hour."""

ANY_HOST = "0.0.0.0"

INSTANCE_GRACE_S = 40.0
"""For an instance: it asks the fleet for leave, 30 s at most, and finishes its requests meanwhile."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The demand of one task: CPU cores, and devices of a kind (0 on a CPU)."""

    cores: int
    devices: int
    kind: Literal["cpu", "cuda", "npu"]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The tasks of a run.

    `name` is the name of the run's directory. `env` is the environment of all tasks beyond the cluster's own; the token
    (`ASYNC_RL_TOKEN`) is not part of it: each launcher passes it on in a way that others cannot read. After SIGTERM a
    training task is killed when `training_grace_s` have passed.
    """

    name: str
    config_path: Path
    config: Config
    overrides: tuple[str, ...]
    env: Mapping[str, str]
    num_nodes: int
    ranks_per_node: int
    node: Resources
    training_grace_s: float
    min_instances: int
    max_instances: int
    instance: Resources
    instance_grace_s: float
    fleet_port: int
    master_port: int

    def training_argv(self, *, node_rank: str, master_address: str) -> list[str]:
        """torchrun on one training node; the first one (`node_rank` 0) has rank 0, whose address others must know.

        The rendezvous is torchrun's static one: with c10d's the nodes are numbered by their addresses, so it would
        not be known in advance where rank 0, and with it the fleet endpoint, will be.
        """
        return [
            *(self.config.cluster.python or sys.executable, "-m", "async_rl.torchrun"),
            *("--nnodes", str(self.num_nodes), "--node-rank", node_rank, "--nproc-per-node", str(self.ranks_per_node)),
            *("--master-addr", master_address, "--master-port", str(self.master_port)),
            *("--shutdown-timeout", str(math.ceil(self.config.checkpoint.grace_s + GRACE_S))),
            *("--log-dir", str(torchrun_dir(self.config.run.dir))),
            *("--stopped-after-s", str(stopped_after_s(self.config.trainer.lost_after_s))),
            *("-m", "async_rl.trainer", str(self.config_path), *self.overrides),
            f"--pool.fleet_address={ANY_HOST}:{self.fleet_port}",
            "--run.resume=true",
        ]

    def instance_argv(self, *, name: str, port: int, register: str, patience_s: float = PATIENCE_S) -> list[str]:
        """One instance, called `name`, that listens at all addresses of its host; port 0 takes a free one.

        `register` is the URL of the fleet endpoint, or the run's directory where all hosts see it; `patience_s` is how
        long it waits for a trainer before it ends, 0 for ever.
        """
        python = self.config.inference.python or self.config.cluster.python or sys.executable
        where = ("--register", register, "--name", name, "--patience-s", str(patience_s))
        return instance_command(self.config, python, ANY_HOST, port, *where)


def plan_cluster(config_path: Path, config: Config, overrides: Sequence[str]) -> ClusterPlan:
    """The tasks of a run on a cluster.

    Args:
        config_path: the TOML file `config` was read from; every training rank reads it again, under the same path.
        config: the loaded config, overrides applied.
        overrides: the `--section.key=value` words it was loaded with, passed on to the trainer.

    Raises:
        ConfigError: the config has instances that run elsewhere, or asks for what cannot run.
    """
    if config.pool.instances:
        raise ConfigError(
            f"pool.instances is {list(config.pool.instances)}, but this launcher "
            f"starts its own {config.inference.num_instances} instances, which register themselves: remove the key"
        )
    if config.run.placement != "separate":
        raise ConfigError(
            f"run.placement is {config.run.placement!r}, but a cluster's launcher places instances on devices of their "
            "own: leave the key out, or start the run on one host with async-rl run"
        )
    require_engine_for_device(config)
    cluster, ranks = config.cluster, config.trainer.num_local_ranks
    grace_s = config.checkpoint.grace_s + 2 * GRACE_S
    return ClusterPlan(
        name=config.run.dir.absolute().name,
        config_path=config_path.resolve(),
        config=config,
        overrides=tuple(overrides),
        env=process_environment(threads=1) | cluster.env,
        num_nodes=cluster.training_nodes,
        ranks_per_node=ranks,
        node=_resources(config, workers=ranks),
        training_grace_s=grace_s,
        min_instances=config.inference.num_instances,
        max_instances=cluster.max_instances or config.inference.num_instances,
        instance=_resources(config, workers=config.inference.tensor_parallel),
        instance_grace_s=INSTANCE_GRACE_S,
        fleet_port=config.pool.fleet_port or FLEET_PORT,
        master_port=master_port(config.pool.fleet_port),
    )


def master_port(fleet_port: int) -> int:
    """Of a run with this port in `pool.fleet_address`."""
    if not fleet_port:
        return MASTER_PORT
    return fleet_port + 1 if fleet_port < LAST_PORT else fleet_port - 1


def _resources(config: Config, *, workers: int) -> Resources:
    """A core for each worker, and one more for the process's other work."""
    kind = config.trainer.device
    return Resources(workers + 1, 0 if kind == "cpu" else workers, kind)


def require_engine_for_device(config: Config) -> None:
    """
    Raises:
        ConfigError: the engine does not run on the config's devices.
    """
    if config.trainer.device == "npu" and config.inference.engine == "transformers":
        raise ConfigError(
            "trainer.device is 'npu' with inference.engine = 'transformers', which does not run there: set "
            "inference.engine to 'vllm' (with vllm-ascend)"
        )


def instance_command(config: Config, python: str, host: str, port: int, *more: str) -> list[str]:
    """The command line of one instance that listens at `host` and `port`; `more` are options besides those that follow
    from the config."""
    options = {
        "--engine": config.inference.engine,
        "--model": config.model.path,
        "--host": host,
        "--port": port,
        "--device": config.trainer.device,
        "--tp": config.inference.tensor_parallel,
        "--dtype": config.model.dtype,
        "--max-concurrency": config.inference.max_concurrency,
        "--max-model-len": config.max_model_len,
    }
    given = [word for key, value in options.items() if value is not None for word in (key, str(value))]
    exact = ["--exact"] if config.train.exact else []
    of_engine = ["--", *config.engine_options] if config.engine_options else []
    return [python, "-m", "inference_service", *given, *more, *exact, *of_engine]


def process_environment(threads: int) -> dict[str, str]:
    """Of an instance or the training ranks, beyond the launcher's own, with so many threads for each worker."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Files of the working directory must not replace modules of the same name.
        "PYTHONSAFEPATH": "1",
    }
