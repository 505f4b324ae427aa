"""The instances of `benchmarks.chaos`: real ones, each a process behind its own proxy.

They are forked from a server that has the engine's modules loaded already: a start then takes a fraction of a second
instead of many CPU seconds, so that far more starts fit into a run.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
from multiprocessing.process import BaseProcess
from pathlib import Path

from async_rl.shared.net.free_ports import free_ports
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.proxy import Disturbance, Proxy, Published
from inference_service.__main__ import main as run_instance

PR_SET_PDEATHSIG = 1
END_TIMEOUT_S = 10.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["inference_service.server", __name__])


class Instance:
    """One instance: a process, which may be restarted repeatedly, and its proxy."""

    def __init__(self, name: str, proxy: Proxy, options: list[str], log_file: Path) -> None:
        self.name = name
        self.proxy = proxy
        self.is_hurt = False
        """Whether it currently has a fault from the pool's controller, which the controller will end itself."""
        self._options = options
        self._log_file = log_file
        self._process: BaseProcess | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Starts its process, at a new port."""
        (port,) = free_ports(1)
        self.proxy.target = f"http://127.0.0.1:{port}"
        argv = [*self._options, "--port", str(port), "--name", self.name, "--advertise", self.proxy.url]
        self._process = _forks.Process(target=_serve, args=(argv, str(self._log_file)), daemon=True)
        self._process.start()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(END_TIMEOUT_S)

    def stall(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)


class Crew:
    """All instances of a run; names are never used twice, except by an instance that is started again."""

    def __init__(
        self,
        model: Path,
        fleet_url: str,
        logs: Path,
        max_model_len: int,
        disturbance: Disturbance,
        draw: random.Random,
        log: FaultLog,
    ) -> None:
        self.instances: list[Instance] = []
        self._options = ["--model", str(model), "--max-model-len", str(max_model_len), "--register", fleet_url]
        self._options += ["--max-concurrency", "32"]
        self._logs = logs
        self._disturbance = disturbance
        self._draw = draw
        self._log = log
        self._published = Published()
        self._num_names = 0
        logs.mkdir(parents=True, exist_ok=True)

    @property
    def num_streams(self) -> int:
        """Responses on their way from any instance."""
        return sum(instance.proxy.num_streams for instance in self.instances)

    async def add(self) -> Instance:
        """Starts an instance that joins the fleet."""
        name = f"instance-{self._num_names}"
        self._num_names += 1
        # Each has its own random generator: what one does must not change what happens to the others.
        proxy = Proxy(self._disturbance, random.Random(self._draw.random()), self._log, self._published)
        await proxy.start()
        instance = Instance(name, proxy, self._options, self._logs / f"{name}.log")
        instance.start()
        self.instances.append(instance)
        return instance

    async def remove(self, instance: Instance) -> None:
        self.instances.remove(instance)
        instance.kill()
        await instance.proxy.close()

    async def close(self) -> None:
        while self.instances:
            await self.remove(self.instances[0])


def _serve(argv: list[str], log_file: str) -> None:
    """In the forked process: runs `python -m inference_service`, and ends with the benchmark, however it ends."""
    if sys.platform == "linux":
        # Also reaches stalled processes.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_benchmark, args=(os.getppid(),), daemon=True).start()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["inference_service", *argv]
    os._exit(run_instance())


def _end_with_benchmark(fork_server: int) -> None:
    """Waits until the benchmark ends; then kills the fork server, and with it all instances."""
    benchmark = multiprocessing.parent_process()
    assert benchmark is not None, "called in a forked process"
    benchmark.join()
    os.kill(fork_server, signal.SIGKILL)
    os._exit(1)
