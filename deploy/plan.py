"""From a config to the processes of a run: pure data, nothing is started. Called by every launcher.

The launcher says what its machine offers (cores, ports), so the same inputs always give the same plan.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from async_rl.config import Config
from async_rl.errors import ConfigError

HOST = "127.0.0.1"
LOGPROBS_MODE = "processed_logprobs"
"""Instances answer with log-probs after temperature, the ones the responses were sampled with."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start: `env` is added to the launcher's own, `cores` are the CPU cores it stays on."""

    name: str
    role: Literal["instance", "trainer", "program"]
    argv: tuple[str, ...]
    log_file: Path
    cores: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a run; `urls[i]` is where `instances[i]` will answer."""

    instances: tuple[Process, ...]
    trainer: Process
    urls: tuple[str, ...]


def num_ports(config: Config) -> int:
    """How many free ports `plan` needs: one per instance."""
    return config.inference.num_instances


def plan(
    config_path: Path, config: Config, overrides: Sequence[str], *, cores: Sequence[int], ports: Sequence[int]
) -> Plan:
    """The processes of a run on one host.

    Args:
        config_path: the TOML file `config` was read from; the trainer reads it again.
        config: the loaded config, overrides applied.
        overrides: the `--dotted.overrides` it was loaded with, handed on to the trainer.
        cores: CPU cores to share among the processes; empty for no pinning.
        ports: `num_ports(config)` free TCP ports of the loopback interface.

    Raises:
        ConfigError: `pool.instances` is set (they run elsewhere), or too few ports were given.
    """
    if config.pool.instances:
        raise ConfigError(
            f"pool.instances is {list(config.pool.instances)}, but this launcher starts its own "
            f"{config.inference.num_instances}: remove the key, or start the trainer alone with torchrun -m trainer"
        )
    if len(ports) != num_ports(config):
        raise ConfigError(f"{len(ports)} ports were given, expected {num_ports(config)}: one per instance")
    instance_cores, trainer_cores = split_cores(cores, config.inference.num_instances)
    instances = tuple(_instance(config, i, port, instance_cores[i : i + 1]) for i, port in enumerate(ports))
    urls = tuple(f"http://{HOST}:{port}" for port in ports)
    trainer = _trainer(config_path, config, overrides, urls, trainer_cores)
    return Plan(instances, trainer, urls)


def split_cores(cores: Sequence[int], num_instances: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One core per instance, and the others to the trainer, who gets at least one of its own.

    Returns:
        `num_instances` cores, shared among instances where there are too few, and the trainer's. With fewer than two
        cores both are empty: there is nothing to keep apart.
    """
    if len(cores) < 2:
        return (), ()
    num_shared = min(num_instances, len(cores) - 1)
    return tuple(cores[i % num_shared] for i in range(num_instances)), tuple(cores[num_shared:])


def _instance(config: Config, index: int, port: int, cores: tuple[int, ...]) -> Process:
    name = f"instance-{index}"
    max_model_len = config.prompts.max_prompt_tokens + config.rollout.max_response_tokens
    options = {
        "--engine": config.inference.engine,
        "--model": config.model.path,
        "--host": HOST,
        "--port": port,
        "--device": config.trainer.device,
        "--tp": config.inference.tensor_parallel,
        "--dtype": config.model.dtype,
        "--max-concurrency": config.inference.max_concurrency,
        "--max-model-len": max_model_len,
        "--logprobs-mode": LOGPROBS_MODE,
    }
    argv = [config.inference.python or sys.executable, "-m", "inference_service"]
    for key, value in options.items():
        argv += [key, str(value)]
    if config.inference.engine_options:
        argv += ["--", *config.inference.engine_options]
    return _process(config, name, "instance", argv, cores)


def _trainer(
    config_path: Path,
    config: Config,
    overrides: Sequence[str],
    urls: Sequence[str],
    cores: tuple[int, ...],
) -> Process:
    argv = [
        *(sys.executable, "-m", "torch.distributed.run"),
        # Finds the port of its rendezvous itself, and so cannot lose it to another process in between.
        *("--standalone", "--local-addr", HOST, "--nproc-per-node", str(config.trainer.num_local_ranks)),
        *("-m", "trainer", str(config_path), *overrides),
        *("--pool.instances", json.dumps(list(urls))),
    ]
    return _process(config, "trainer", "trainer", argv, cores)


def _process(
    config: Config, name: str, role: Literal["instance", "trainer"], argv: Sequence[str], cores: tuple[int, ...]
) -> Process:
    # One thread each: two busy processes with two torch threads each ran three times slower on two cores.
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return Process(name, role, tuple(argv), log_path(config.run.dir, name), cores, env)


def log_path(run_dir: Path, name: str) -> Path:
    """Where a process of a run writes its output."""
    return run_dir / "logs" / f"{name}.log"
