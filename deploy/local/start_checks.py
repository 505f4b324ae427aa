"""What `async-rl run` checks right before it starts a config's processes, and `async-rl check` without starting any."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.checks.preflight import require_sound
from async_rl.config.rollout_section import SINGLE_TURN
from async_rl.config.sections import Config
from async_rl.errors import ConfigError
from async_rl.shared.net.free_ports import free_ports
from async_rl.shared.net.listener import listen
from async_rl.shared.programs.extras import SERVES_WITH, require_extras
from async_rl.shared.programs.nccl_package import HAS_NCCL, MATCHING, nccl_package
from deploy.cluster.process import Process
from deploy.local.machine import this_machine
from deploy.local.plan import Plan, num_ports, plan
from deploy.local.torch_build import require_torch_for

HOW_TO_GET_VLLM = (
    "give the Python of an environment with vLLM; `make vllm` in a checkout of async-rl makes .venv-vllm/bin/python, "
    "for CPU"
)

CHECK_TIMEOUT_S = 120.0
"""A Python that looks up its packages takes a second; on a busy machine with a slow disk far more."""


def make_plan(config_path: Path, config: Config, overrides: Sequence[str]) -> Plan:
    """The plan of a run on this machine's cores, devices and free ports.

    Raises:
        ConfigError: the machine lacks the requested resources.
    """
    machine = this_machine(config.trainer.device)
    return plan(config_path, config, overrides, machine=machine, ports=free_ports(num_ports(config)))


def require_startable(program: str, config: Config, this_plan: Plan) -> None:
    """Checks packages, config and engine of a run that `program` starts.

    Raises:
        ConfigError: one of them cannot be used.
    """
    require_packages(program, config)
    require_torch_for(config.trainer.device)
    require_sound(config, trains=True, serves=True)
    require_addresses(config)
    require_engine(config, this_plan.instances[0])


def require_packages(program: str, config: Config) -> None:
    """Checks that this interpreter has what trainer and instances of a config import, for a run of `program`.

    Raises:
        ConfigError: it does not.
    """
    # inference.python may be another interpreter, with other packages.
    serves_itself = config.inference.engine == "transformers" and config.inference.python is None
    require_extras(program, "trainer", *(("serve",) if serves_itself else ()), *config.tracking.extras)


def require_addresses(config: Config) -> None:
    """Checks that the trainer's servers could listen on this host now, before instances start, which may take minutes.

    Raises:
        ConfigError: an address is not of this host, or a port is taken.
    """
    pool, rollout = config.pool, config.rollout
    listen("the fleet endpoint", pool.fleet_host, pool.fleet_port, "pool.fleet_address").close()
    if rollout.program != SINGLE_TURN:
        listen("the gateway", rollout.options.gateway_host, 0, "rollout.options.gateway_host").close()


def require_engine(config: Config, instance: Process) -> None:
    """Checks that the interpreter of the instances exists, and has the engine.

    Raises:
        ConfigError: it does not.
    """
    python = config.inference.python
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"inference.python is {python!r}, which is no program: {HOW_TO_GET_VLLM}")
    if python is None and config.inference.engine == "transformers":
        return  # The launcher's own interpreter, whose extras were checked.
    separator = instance.argv.index("--") if "--" in instance.argv else len(instance.argv)
    argv = [*instance.argv[:separator], "--check", *instance.argv[separator:]]
    what = f"inference.engine is {config.inference.engine!r} with inference.python = {python!r}, which"
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=CHECK_TIMEOUT_S
        )
    except OSError as error:
        raise ConfigError(f"{what} cannot be started ({error.strerror}): {HOW_TO_GET_VLLM}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{what} did not say within {CHECK_TIMEOUT_S:g} s whether it can serve: {HOW_TO_GET_VLLM}"
        ) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it says nothing"]
        raise ConfigError(f"{what} cannot serve: {said[0].removeprefix('inference_service: ')}")
    if not any(line.startswith(SERVES_WITH) for line in done.stdout.splitlines()):
        raise ConfigError(
            f"{what} is no Python with async-rl's inference_service: `{shlex.join(argv)}` ended well, but without the "
            f"line {SERVES_WITH + ' ...'!r}; {HOW_TO_GET_VLLM}"
        )
    if config.trainer.device == "cuda" and config.publish.is_broadcast:
        _require_equal_nccl(done.stdout, what)


def _require_equal_nccl(said: str, what: str) -> None:
    """Before minutes of loading, after which NCCL would refuse the weight group."""
    own = nccl_package()
    others = [line.removeprefix(HAS_NCCL).strip() for line in said.splitlines() if line.startswith(HAS_NCCL)]
    if own is not None and others and others[0] != own:
        raise ConfigError(
            f"{what} has NCCL {others[0]}, and the trainer's {sys.executable} has {own}: NCCL connects equal versions "
            f"only; install a matching pair, such as {MATCHING}, or set publish.transport = 'snapshot'"
        )
