"""Faults of the trainer of a run: its own end, and those of the processes that run its rollout program."""

import asyncio
import random
import signal

import psutil

from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.trainer_run import TrainerRun

GAP_S = (0.5, 3.0)
"""Seconds from one fault of a worker to the next."""
STALL_S = (0.2, 3.0)
POLL_S = 0.1


class TrainerFaults:
    """Acts on the processes of `run`.

    Args:
        worker: a word of the command lines of the program's processes; None if there are none.
        num_kills: how often the trainer is killed, in even parts of the run.
    """

    def __init__(self, run: TrainerRun, draw: random.Random, log: FaultLog, worker: str | None, num_kills: int) -> None:
        self._run = run
        self._draw = draw
        self._log = log
        self._worker = worker
        self._deaths = [number / (num_kills + 1) for number in range(1, num_kills + 1)]

    async def kill_trainer(self) -> None:
        """Returns after the last kill."""
        for progress in self._deaths:
            while self._run.progress < progress:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(self._draw.uniform(0.0, 1.0))
            self._run.kill()
            self._log.note("trainer kill")

    async def injure_workers(self) -> None:
        """One after the other, until it is cancelled."""
        while self._worker is not None:
            await asyncio.sleep(self._draw.uniform(*GAP_S))
            workers = self._run.processes(self._worker)
            if workers:
                await self._injure(self._draw.choice(workers))

    async def _injure(self, worker: psutil.Process) -> None:
        if self._draw.random() < 0.7:
            self._send(worker, signal.SIGKILL, "worker kill")
            return
        self._send(worker, signal.SIGSTOP, "worker stall")
        try:
            await asyncio.sleep(self._draw.uniform(*STALL_S))
        finally:
            self._send(worker, signal.SIGCONT)

    def _send(self, worker: psutil.Process, number: signal.Signals, kind: str | None = None) -> None:
        """A signal to a process that may have ended."""
        try:
            worker.send_signal(number)
        except psutil.NoSuchProcess:
            return
        if kind is not None:
            self._log.note(kind)
