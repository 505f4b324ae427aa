"""Faults of the trainer of a run: its own end, and those of the processes that run its rollout program."""

import asyncio
import random
import signal
from collections.abc import Callable, Mapping

import psutil

from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.trainer_run import PRODUCER, TrainerRun

GAP_S = (0.5, 3.0)
"""Seconds from one fault of a worker to the next."""
STALL_S = (0.2, 3.0)
BUSY_STREAMS = 3
"""So many responses on their way: rollouts are open, in whichever worker."""
POLL_S = 0.1


class TrainerFaults:
    """Acts on the processes of `run`.

    Args:
        worker: a word of the command lines of the program's processes; None if there are none.
        kills: of "trainer" and "producer", how often each is killed; all of these in even parts of the run, a producer
            while responses are on their way: it is started again, and the trainer goes on.
        num_streams: how many responses are on their way to the trainer.
    """

    def __init__(
        self,
        run: TrainerRun,
        draw: random.Random,
        log: FaultLog,
        worker: str | None,
        kills: Mapping[str, int],
        num_streams: Callable[[], int],
    ) -> None:
        self._run = run
        self._draw = draw
        self._log = log
        self._worker = worker
        self._num_streams = num_streams
        shares = sorted((number / (n + 1), victim) for victim, n in kills.items() for number in range(1, n + 1))
        self._deaths = [(number / (len(shares) + 1), victim) for number, (_, victim) in enumerate(shares, start=1)]

    async def kill(self) -> None:
        """Returns after the last kill."""
        for progress, victim in self._deaths:
            while self._run.progress < progress:
                await asyncio.sleep(POLL_S)
            while not self._run.processes(PRODUCER):
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(self._draw.uniform(0.0, 1.0))
            if victim == "producer":
                while self._num_streams() < BUSY_STREAMS:
                    await asyncio.sleep(POLL_S)
                self._run.kill_producer()
            else:
                self._run.kill()
            self._log.note(f"{victim} kill")

    async def injure_workers(self) -> None:
        """First ends all workers in the midst of rollouts, as a machine without memory would; then one fault after the
        other comes to one worker, whatever it does, until it is cancelled."""
        while self._num_streams() < BUSY_STREAMS:
            await asyncio.sleep(POLL_S)
        for worker in self._workers():
            self._send(worker, signal.SIGKILL, "worker kill")
        while True:
            await asyncio.sleep(self._draw.uniform(*GAP_S))
            if workers := self._workers():
                await self._injure(self._draw.choice(workers))

    def _workers(self) -> list[psutil.Process]:
        return self._run.processes(self._worker) if self._worker else []

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
