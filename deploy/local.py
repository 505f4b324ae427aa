"""Runs a config on this machine: `python -m deploy.local CONFIG [--dotted.overrides]`.

Starts the instances, waits until they answer, starts the trainer and shows its progress. However it ends (success,
Ctrl-C, SIGTERM, a failed part, `kill -9`), every process it started ends too, see `deploy.keeper`.
"""

import argparse
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from async_rl.config import Config, load_config
from async_rl.errors import AsyncRLError, ConfigError, ProcessFailed
from deploy.plan import HOST, Plan, num_ports, plan
from deploy.processes import POLL_S, Deployment, Running, Stopped, explain_end, stop_on_signals
from deploy.progress import JsonlTail, RunView, make_run_view

START_TIMEOUT_S = 1800.0
"""For an instance that neither answers nor ends; vLLM takes many minutes to load a large model and capture graphs."""

HOW_TO_GET_VLLM = (
    "give the Python of an environment with vLLM; `make vllm` in a checkout of async-rl makes .venv-vllm/bin/python, "
    "for CPU"
)


def run_plan(plan: Plan, metrics: JsonlTail, view: RunView) -> None:
    """Runs a plan to the end of its trainer; all its processes are gone on return.

    An instance that ends early is noted in the view: the trainer goes on with the others, or fails by itself when none
    is left.

    Raises:
        ProcessFailed: an instance did not come up, or the trainer ended with another code than 0.
    """
    with Deployment() as deployment:
        instances = [deployment.start(process) for process in plan.instances]
        for instance, url in zip(instances, plan.urls, strict=True):
            wait_until_healthy(instance, url)
        view.note(f"{len(instances)} instance(s) ready, starting the trainer")
        lost: set[str] = set()

        def watch() -> None:
            for record in metrics.read_new():
                view.show(record)
            for instance in instances:
                if instance.exit_code() is not None and instance.process.name not in lost:
                    lost.add(instance.process.name)
                    view.note(f"lost an instance, the others go on: {instance.failure()}")

        deployment.run(plan.trainer, watch)


def wait_until_healthy(instance: Running, url: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until GET `url`/health answers 200.

    Raises:
        ProcessFailed: the instance ended, or did not answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not _answers(f"{url}/health"):
        if instance.exit_code() is not None:
            raise instance.failure()
        if time.monotonic() > deadline:
            raise ProcessFailed(
                f"{instance.process.name} did not answer at {url}/health within {timeout_s:.0f} s; "
                f"see {instance.process.log_file}"
            )
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of the loopback interface that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def own_cores() -> list[int]:
    """CPU cores this process may use; empty where the system does not tell (macOS), which means no pinning."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _answers(url: str) -> bool:
    # Without the proxies of the environment, which would be asked for the loopback address too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _parse(argv: Sequence[str]) -> tuple[Path, list[str]]:
    parser = argparse.ArgumentParser(
        prog="deploy.local",
        description="Starts the inference instances and the trainer of a config on this machine.",
        epilog="Every key of the config can be set as --section.key VALUE.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file, the run's config")
    arguments, overrides = parser.parse_known_args(argv)
    return arguments.config, overrides


def run_config(config_path: Path, config: Config, overrides: Sequence[str], console: Console) -> Plan:
    """Plans a run for this machine's cores and free ports and runs it to its end; returns what was run.

    Raises:
        ConfigError: the run cannot be planned, or inference.python is no program.
    """
    python = config.inference.python
    if python is not None and shutil.which(python) is None:
        raise ConfigError(f"inference.python is {python!r}, which is no program: {HOW_TO_GET_VLLM}")
    this_plan = plan(config_path, config, overrides, cores=own_cores(), ports=free_ports(num_ports(config)))
    with make_run_view(console, config.train.iterations) as view:
        run_plan(this_plan, JsonlTail(config.run.dir / "metrics.jsonl"), view)
    return this_plan


def main(argv: Sequence[str]) -> int:
    console = Console()
    stop_on_signals()
    try:
        config_path, overrides = _parse(argv)
        run_config(config_path, load_config(config_path, overrides), overrides, console)
    except (Stopped, AsyncRLError) as end:
        return explain_end(end, console)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
