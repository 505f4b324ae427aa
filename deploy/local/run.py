"""Runs a config on this machine: `async-rl run CONFIG [--section.key VALUE ...]`.

Starts the instances, waits until they are healthy, starts the trainer and shows its progress; `supervisor.py` starts
again what dies. However it ends (success, Ctrl-C, SIGTERM, a failed process, `kill -9`), every process it started ends
too, see `async_rl.programs.process_guard`.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from async_rl.net.http_client import HttpClient, answers_200
from async_rl.preflight import require_sound
from async_rl.programs.command_line import Parser
from async_rl.programs.extras import require_extras
from deploy.cluster.process import Process, Running
from deploy.cluster.run_view import make_run_view
from deploy.cluster.stopping import Stopped, explain_end, stop_on_signals
from deploy.local.machine import free_ports, this_machine
from deploy.local.plan import Plan, describe, num_ports, plan
from deploy.local.processes import POLL_S, Deployment
from deploy.local.supervisor import Supervisor

START_TIMEOUT_S = 1800.0
"""For an instance that is neither healthy nor ended; vLLM may take many minutes to load and capture graphs."""

PROBE_TIMEOUT_S = 2.0

HOW_TO_GET_VLLM = (
    "give the Python of an environment with vLLM; `make vllm` in a checkout of async-rl makes .venv-vllm/bin/python, "
    "for CPU"
)


def wait_until_healthy(instance: Running, url: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until GET `url`/health returns 200.

    Raises:
        ProcessFailed: the instance ended, or was not healthy within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not is_healthy(instance, url):
        if time.monotonic() > deadline:
            raise ProcessFailed(
                f"{instance.process.name} did not answer at {url}/health within {timeout_s:.0f} s; "
                f"see {instance.process.log_file}"
            )
        time.sleep(POLL_S)


def is_healthy(instance: Running, url: str) -> bool:
    """Whether GET `url`/health returns 200.

    Raises:
        ProcessFailed: it is not healthy, and the instance has ended.
    """
    if answers_200(HttpClient(url, PROBE_TIMEOUT_S), "/health"):
        return True
    if instance.exit_code() is not None:
        raise instance.failure()
    return False


def make_parser() -> Parser:
    parser = Parser(
        "async-rl run",
        "Starts the inference instances and the trainer of a config on this machine, and ends them all when it ends.",
        "CONFIG [--section.key VALUE ...]",
        Config,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be started, on which cores, devices and ports, and what is wrong; start nothing",
    )
    return parser


def make_plan(config_path: Path, config: Config, overrides: Sequence[str]) -> Plan:
    """The plan of a run on this machine's cores, devices and free ports.

    Raises:
        ConfigError: the machine lacks the requested resources.
    """
    machine = this_machine(config.trainer.device)
    return plan(config_path, config, overrides, machine=machine, ports=free_ports(num_ports(config)))


def run_config(config_path: Path, config: Config, overrides: Sequence[str], console: Console) -> Plan:
    """Plans a run for this machine's cores and free ports and runs it until it ends; returns the plan.

    Raises:
        ConfigError: the config is not usable, as far as this can be checked before anything is started.
        ProcessFailed: an instance did not start, or the trainer failed in a way that no restart mends.
        RestartsExhausted: the trainer failed more often than `cluster.max_restarts` without progress.
    """
    this_plan = make_plan(config_path, config, overrides)
    require_startable("async-rl run", config, this_plan)
    with make_run_view(console, config.train.iterations) as view, Deployment() as deployment:
        instances = [deployment.start(process) for process in this_plan.instances]
        for instance, url in zip(instances, this_plan.urls, strict=True):
            wait_until_healthy(instance, url)
        view.note(f"{len(instances)} instance(s) ready, starting the trainer")
        Supervisor(this_plan, config, deployment, instances, view).run()
    return this_plan


def require_startable(program: str, config: Config, this_plan: Plan) -> None:
    """All checks of a run that `program` starts which are possible before anything is started.

    Raises:
        ConfigError: a package is missing, or the config is not usable.
    """
    # inference.python may be another interpreter, with other packages.
    serves_itself = config.inference.engine == "transformers" and config.inference.python is None
    require_extras(program, "trainer", *(("serve",) if serves_itself else ()))
    require_sound(config, trains=True, serves=True)
    require_engine(config, this_plan.instances[0])


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
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it says nothing"]
        raise ConfigError(
            f"inference.engine is {config.inference.engine!r} with inference.python = {python!r}, which cannot serve: "
            f"{said[0].removeprefix('inference_service: ')}"
        )


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    console = Console()
    stop_on_signals()
    try:
        config = load_config(arguments.config, parser.overrides)
        if arguments.dry_run:
            this_plan = make_plan(arguments.config, config, parser.overrides)
            print(describe(this_plan), flush=True)
            require_startable("async-rl run", config, this_plan)
            return 0
        run_config(arguments.config, config, parser.overrides, console)
    except (Stopped, AsyncRLError) as end:
        return explain_end(end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
