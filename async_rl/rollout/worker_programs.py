"""Rollout programs named `python:path/to/file.py:function`, in `rollout.num_workers` processes of their own."""

import asyncio
import logging

from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import ConfigError
from async_rl.programs.user_file import file_identity
from async_rl.rollout.program import ProgramPrompt, RolloutResult
from async_rl.rollout.program_process import LoadingEnded, NotLoaded, ProgramProcess
from async_rl.rollout.session import RolloutSession

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A worker imports the program's packages; on a cold disk that takes long."""


class _Worker:
    """A process and its number of rollouts."""

    def __init__(self, program: str) -> None:
        self.process = ProgramProcess(program)
        self.starting = asyncio.Lock()
        self.num_rollouts = 0


class WorkerProgram:
    """Implements `Program`. A rollout runs in the process with the fewest rollouts, beside these."""

    def __init__(self, config: RolloutSection) -> None:
        """
        Raises:
            ConfigError: the program's file does not exist.
        """
        self._identity = file_identity("rollout.program", config.program)
        self._config = config
        self._workers = [_Worker(config.program) for _ in range(config.num_workers)]

    async def start(self) -> None:
        await asyncio.gather(*map(self._start, self._workers))

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        worker = min(self._workers, key=lambda worker: worker.num_rollouts)
        worker.num_rollouts += 1
        try:
            await self._start(worker)
            return await worker.process.run(prompt, session, self._config.timeout_s)
        finally:
            worker.num_rollouts -= 1

    async def close(self) -> None:
        await asyncio.gather(*(worker.process.close() for worker in self._workers))

    async def _start(self, worker: _Worker) -> None:
        async with worker.starting:
            if worker.process.running:
                return
            if file_identity("rollout.program", self._config.program) != self._identity:
                raise ConfigError(
                    f"rollout.program {self._config.program!r}: its file has changed since the run began, and a "
                    "process has to load it again: restore it, or resume the run with run.accept_changes"
                )
            try:
                await self._load(worker.process)
            except NotLoaded as error:
                raise ConfigError(f"rollout.program {self._config.program!r} cannot be loaded:\n{error}") from error

    async def _load(self, process: ProgramProcess) -> None:
        """Starts a process, again if it ends meanwhile: a machine without memory kills whatever starts."""
        for attempt in range(1, self._config.max_attempts):
            try:
                await process.start(START_TIMEOUT_S)
                return
            except LoadingEnded as error:
                log.warning("rollout.program %r, attempt %d to load it: %s", self._config.program, attempt, error)
        await process.start(START_TIMEOUT_S)
