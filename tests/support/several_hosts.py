"""A run on several hosts: two that train, and instances on further hosts; started as `deploy.cluster.plan` says."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rl.config.file import load_config
from async_rl.shared.protocol.fleet import FleetInfo, InstanceInfo
from async_rl.shared.protocol.routes import FLEET
from benchmarks.common.hosts import Disks, Hosts
from benchmarks.common.link import Link
from deploy.cluster.plan import plan_cluster
from tests.support.local_run import Run
from tests.support.programs import TOKEN, Programs

TRAINING = ("node-1", "node-2")
INSTANCES = ("early", "cut", "late")
NETWORK = "data"
LINK = Link(delay_s=0.005, loss=0.002, bits_per_s=1e9)
"""20 ms from host to host and back."""

PORT = 8001
ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
print(urllib.request.urlopen(request).read().decode())
"""
FINISH_S = 240.0


class SeveralHosts:
    """Each host has its own disk, with a copy of model, prompts and reward, and a name that resolves to loopback.

    The two training hosts share the run's directory, and `gates/`: with the reward `gated` a batch ends only after
    `open_gate`.
    """

    def __init__(self, path: Path, model: Path, programs: Programs, *overrides: str) -> None:
        self._path = path
        self._programs = programs
        disks = Disks(path / "disk", {"run": TRAINING, "gates": TRAINING})
        names = [*TRAINING, *INSTANCES]
        addresses = {name: {"none": "127.0.1.1", NETWORK: f"10.80.2.{i}"} for i, name in enumerate(names, start=1)}
        self.hosts = Hosts({NETWORK: "/24"}, addresses, {NETWORK: LINK}, disks)
        self.run = Run(disks.path, disks.path / "model")
        words = [f"--cluster.training_nodes={len(TRAINING)}", "--trainer.num_processes=1", *overrides]
        self._plan = plan_cluster(self.run.config, load_config(self.run.config, words), words)
        for name in names:
            shutil.copytree(model, disks.of(name) / "model")
        for file in [file for file in disks.path.iterdir() if file.is_file()]:
            for name in TRAINING:
                shutil.copy(file, disks.of(name))
            file.unlink()
        self.run.dir = disks.on_server("run")
        self._gates = disks.on_server("gates")
        self.run.output = path / "node-1.txt"
        self.nodes: list[subprocess.Popen[bytes]] = []

    def close(self) -> None:
        self._programs.close()
        self.hosts.close()

    def start_trainer(self) -> None:
        self.nodes = [
            self._programs.start(
                self.hosts[name],
                self._plan.training_argv(node_rank=str(rank), master_address=self._main_address),
                self._path / f"{name}.txt",
            )
            for rank, name in enumerate(TRAINING)
        ]

    def start_instance(self, name: str) -> None:
        argv = self._plan.instance_argv(name=name, port=PORT, register=self._fleet_url)
        self._programs.start(self.hosts[name], argv, self._path / f"{name}.txt")

    def instances(self) -> dict[str, InstanceInfo]:
        """As the fleet endpoint knows them, by name."""
        answer = self.hosts[TRAINING[0]].ask(sys.executable, "-c", ASK, self._fleet_url + FLEET, TOKEN)
        return {info.name: info for info in FleetInfo.model_validate_json(answer).instances}

    def has_begun(self) -> bool:
        """Whether the first responses wait at a gate."""
        return (self._gates / "begun").exists()

    def open_gate(self, batch: int) -> None:
        """Lets the responses of a batch, counted from 0, be scored."""
        (self._gates / str(batch)).touch()

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + FINISH_S
        while not what():
            assert [node.poll() for node in self.nodes] == [None] * len(self.nodes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def wait_for_iterations(self, number: int) -> None:
        self.wait_for(lambda: len(self.run.lines("metrics.jsonl")) >= number)

    def finish(self) -> list[int]:
        """The exit codes of the training hosts."""
        return [node.wait(FINISH_S) for node in self.nodes]

    def said(self, name: str = "*") -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._path.glob(f"{name}.txt")))

    @property
    def _main_address(self) -> str:
        return self.hosts[TRAINING[0]].addresses[NETWORK]

    @property
    def _fleet_url(self) -> str:
        return f"http://{self._main_address}:{self._plan.fleet_port}"


def on_one_host(path: Path, model: Path, overrides: Sequence[str]) -> Run:
    """The same run on this host, with one instance; returns when it has ended."""
    path.mkdir()
    run = Run(path, model)
    run.start("--trainer.num_processes=2", *overrides)
    assert run.finish() == 0, run.everything_said()
    return run
