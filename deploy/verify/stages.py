"""The trainer's runs of a verification, one after the other, on instances that stay; called by `verification.py`.

Each stage is a run of the user's config with few iterations and a directory of its own. A fault is planted by killing
the guard of a process: Linux then kills the process and all its descendants, as `kill -9` of each of them would.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.file import load_config
from async_rl.config.sections import Config
from async_rl.errors import ConfigError, NoAnswer, ProcessFailed
from async_rl.records.run_records import RunRecords
from async_rl.shared.checkpoint_names import checkpoints_dir, newest_checkpoint
from async_rl.shared.net.http_client import HttpClient
from deploy.cluster.process import Running
from deploy.local.machine import Machine
from deploy.local.plan import Plan, plan
from deploy.local.processes import POLL_S, Deployment
from deploy.local.run import wait_until_healthy

CAN_KILL = sys.platform == "linux"

INSTANCES = "instances"
"""The folder of their logs, which never holds the records of a run."""

WATCH_S = 0.01
"""An iteration of the smallest models takes a tenth of a second."""

SCRAPE_TIMEOUT_S = 2.0
NUM_RUNNING = re.compile(rb"^vllm:num_requests_running(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ended:
    """A stage that has ended: its directory, and its failure, if it did not train to its end."""

    run_dir: Path
    failure: ProcessFailed | None


class Stages:
    """The stages of one verification in `out`.

    Args:
        common: overrides of every stage, the user's own first.
        machine, ports: as for `plan`, of all stages.
        token: bearer token of the instances, if they require one.
    """

    def __init__(
        self,
        config_path: Path,
        common: Sequence[str],
        out: Path,
        machine: Machine,
        ports: Sequence[int],
        deployment: Deployment,
        token: str | None,
    ) -> None:
        self._config_path = config_path
        self._common = common
        self._out = out
        self._machine = machine
        self._ports = ports
        self._deployment = deployment
        self._token = token
        self._instances: list[Running] = []
        self._clients: list[HttpClient] = []
        self.urls: tuple[str, ...] = ()

    @property
    def groups(self) -> Path:
        """Where the recorded groups are."""
        return self._out / "groups"

    def start_instances(self) -> None:
        """
        Raises:
            ProcessFailed: one did not become healthy.
        """
        the_plan = self._plan(INSTANCES)
        self.urls = the_plan.urls
        self._clients = [HttpClient(url, SCRAPE_TIMEOUT_S, self._token) for url in self.urls]
        self._instances = [self._deployment.start(process) for process in the_plan.instances]
        wait_until_healthy(self._instances, self.urls)

    def run(
        self,
        name: str,
        *overrides: str,
        program: Sequence[str] = ("trainer",),
        while_running: Callable[[Running, Path], None] = lambda running, run_dir: None,
    ) -> Ended:
        """Runs a stage to its end.

        Args:
            while_running: called every `WATCH_S`.

        Raises:
            ConfigError: the config is not usable, as the trainer found.
        """
        the_plan = self._plan(name, *overrides, program=program)
        running, run_dir = self._deployment.start(the_plan.trainer), self._out / name
        while running.exit_code() is None:
            while_running(running, run_dir)
            time.sleep(WATCH_S)
        if running.exit_code() == 0:
            return Ended(run_dir, None)
        failure = running.failure()
        if failure.cause == ConfigError.__name__:
            raise ConfigError(str(failure))
        return Ended(run_dir, failure)

    def kill_instance(self, number: int) -> None:
        """Kills an instance, and waits until it has ended."""
        kill(self._instances[number])

    def num_requests(self, number: int) -> float:
        """Responses that an instance generates at the moment; 0 where it does not say."""
        try:
            page = self._clients[number].get("/metrics").body
        except NoAnswer:
            return 0.0
        match = NUM_RUNNING.search(page)
        return float(match[1]) if match else 0.0

    def _plan(self, name: str, *overrides: str, program: Sequence[str] = ("trainer",)) -> Plan:
        words = (*self._common, f"--run.dir={self._out / name}", *overrides)
        config: Config = load_config(self._config_path, words)
        return plan(self._config_path, config, words, machine=self._machine, ports=self._ports, program=program)


def kill(running: Running) -> None:
    """Ends a process and all that it started, as `kill -9` does, and waits for that."""
    os.kill(running.pid, signal.SIGKILL)
    while running.exit_code() is None:
        time.sleep(POLL_S)


def num_trained(run_dir: Path) -> int:
    """Iterations of a stage that are recorded."""
    return len(list(RunRecords(run_dir).metrics.new_lines()))


def has_checkpoint(run_dir: Path) -> bool:
    return newest_checkpoint(checkpoints_dir(run_dir)) is not None
