"""The processes of a local deployment: started together, and ended in order."""

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from async_rl.shared.programs.start_gate import VARIABLE
from deploy.cluster.process import Process, Running, start_process

POLL_S = 0.2


class Deployment:
    """The processes of a run as a context: leaving it ends them all, the trainer before the instances."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._reports = tempfile.TemporaryDirectory(prefix="async-rl-reports-")

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end_all([running for running in self._running if running.process.role != "instance"])
        _end_all([running for running in self._running if running.process.role == "instance"])
        self._reports.cleanup()

    def start(self, process: Process) -> Running:
        # A process that is started again has a report of its own.
        running = start_process(process, Path(self._reports.name) / f"{process.name}-{len(self._running)}")
        self._running.append(running)
        return running

    def start_at_gate(self, process: Process) -> tuple[Running, Path]:
        """Starts a process that waits, once it has loaded, until the file at the returned path is made."""
        gate = Path(self._reports.name) / f"start-{process.name}"
        return self.start(replace(process, env={**process.env, VARIABLE: str(gate)})), gate

    def run(self, process: Process, while_running: Callable[[], None]) -> None:
        """Runs a process until it exits, calling `while_running` every `POLL_S` and once after.

        Raises:
            ProcessFailed: it exited with a code other than 0.
        """
        running = self.start(process)
        while running.exit_code() is None:
            while_running()
            time.sleep(POLL_S)
        while_running()
        if running.exit_code() != 0:
            raise running.failure()


def _end_all(running: Iterable[Running]) -> None:
    for each in running:
        each.request_end()
    for each in running:
        each.wait_end()
