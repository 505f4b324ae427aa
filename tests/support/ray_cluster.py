"""A Ray cluster of several nodes on this host, and runs that `deploy.ray` launches on it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from tests.support.local_run import Run, command_of, gone

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'")

OBJECT_STORE_BYTES = 75 * 2**20
"""The least that Ray accepts: runs keep nothing there."""

SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}
"""Ray's own. A node whose raylet does not answer is lost after a few seconds; by default after about a minute. What
runs below Ray has the priority of the other tests; by default it is nice, and starves beside them."""


class RayNodes:
    """The head, which has no cores for tasks, and `num_nodes` nodes with `num_cpus` each."""

    def __init__(self, num_nodes: int, num_cpus: int = 2) -> None:
        # Ray, which takes seconds to import, and which a checkout may lack.
        from ray.cluster_utils import Cluster

        # Short, since the paths of Ray's sockets are long already.
        self.temp_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": SETTINGS}
        head |= {"object_store_memory": OBJECT_STORE_BYTES}
        (Path(self.temp_dir) / "ray").mkdir()
        with patch.dict(os.environ, RAY_TMPDIR=self.temp_dir, RAY_USAGE_STATS_ENABLED="0"):
            self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        for _ in range(num_nodes):
            self.add(num_cpus)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, num_cpus: int = 2) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES))

    def kill_raylet_of(self, guard: psutil.Process) -> None:
        """Kills the raylet below the actor that started the guard."""
        actor = guard.parent()
        raylet = actor.parent() if actor is not None else None
        assert raylet is not None, "a living actor has a raylet above it"
        raylet.kill()
        # It is a child of this process: actors take a zombie for a living raylet, and go on.
        raylet.wait()

    def processes(self) -> list[psutil.Process]:
        """Ray's own processes of this cluster, by their files."""
        return [p for p in psutil.process_iter() if any(self.temp_dir in word for word in command_of(p))]

    def close(self) -> None:
        """Ends all nodes; nothing of Ray may be left."""
        mine = self.processes()
        self.cluster.shutdown()
        assert gone(mine), [command_of(p) for p in mine if p.is_running()]
        shutil.rmtree(self.temp_dir)


class RayRun(Run):
    """A run that `python -m deploy.ray` launches; its tasks are no descendants of the launcher."""

    address = ""

    def start(self, *overrides: str) -> None:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.ray", str(self.config), *overrides],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(RAY_ADDRESS=self.address),
            )

    def tasks(self) -> list[psutil.Process]:
        """Every process of the run but the launcher: guards, torchrun, ranks, instances."""
        assert self.process is not None
        marks = (str(self.config), str(self.dir))
        return [
            p
            for p in psutil.process_iter()
            if p.pid not in (self.process.pid, os.getpid())
            and any(mark in word for word in command_of(p) for mark in marks)
        ]

    def guard_of(self, *words: str) -> psutil.Process:
        """The guard of the task with these words in its command."""
        (guard,) = [
            p
            for p in self.tasks()
            if "async_rl.shared.programs.process_guard" in command_of(p) and set(words) <= set(command_of(p))
        ]
        return guard

    def rank(self) -> psutil.Process:
        """The process of the only training rank."""
        ranks = self.guard_of("async_rl.torchrun").children(recursive=True)
        (rank,) = [
            p for p in ranks if "async_rl.trainer" in (words := command_of(p)) and "async_rl.torchrun" not in words
        ]
        return rank

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 240) -> float:
        """Waits until it is true; returns the seconds it took."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begun_s < timeout_s, self.everything_said()
            assert self.process is not None and self.process.poll() is None, self.everything_said()
            time.sleep(0.05)
        return time.monotonic() - begun_s

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}


@contextmanager
def ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    nodes = RayNodes(num_nodes)
    try:
        yield nodes
    finally:
        nodes.close()


def proven(run: Run, iterations: int, num_responses: int) -> None:
    """Asserts that all iterations are in the ledger once, on-policy and whole."""
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(iterations)), run.everything_said()
    assert all(proof["on_policy"] and proof["num_responses"] == num_responses for proof in proofs)
    assert len({proof["fingerprint"] for proof in proofs}) == iterations, "every step changes the weights"
