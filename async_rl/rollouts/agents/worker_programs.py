"""Rollout programs named `python:path/to/file.py:function`, in `rollout.options.num_workers` processes of their own."""

import asyncio
import logging
from typing import Any

from async_rl.config.rollout_section import RolloutSection
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.rollouts.agents.program import SETTING, ProgramFailed, ProgramInterrupted, ProgramPrompt, RolloutResult
from async_rl.rollouts.agents.session import InvalidRequest, LimitReached, RolloutSession, SessionClosed
from async_rl.shared.programs.user_file import file_identity
from async_rl.shared.workers.worker import (
    Call,
    CallCrashed,
    CallFailed,
    CallInterrupted,
    CallStuck,
    LoadingEnded,
    NotLoaded,
    Worker,
    WorkerPool,
)

log = logging.getLogger(__name__)

END_GRACE_S = 2.0
"""How long a program may take to end after it was cancelled: it may close connections, and return a reward."""

MAX_REFUSED = 10_000
"""A program that asks so often in vain does nothing else."""


class WorkerProgram:
    """Implements `Program`. A rollout runs in the process with the fewest rollouts, beside these."""

    def __init__(self, config: RolloutSection) -> None:
        """
        Raises:
            ConfigError: the program's file does not exist.
        """
        self._identity = file_identity(SETTING, config.program)
        self._config = config
        self._pool = WorkerPool(
            [program_worker(config.program) for _ in range(config.options.num_workers)], self._start
        )

    async def start(self) -> None:
        await self._pool.start()

    async def run(self, prompt: ProgramPrompt, session: RolloutSession) -> RolloutResult:
        async with self._pool.taken() as worker:
            return await run_program(worker, prompt, session, self._config.options.timeout_s)

    async def close(self) -> None:
        await self._pool.close()

    async def _start(self, worker: Worker) -> None:
        program = self._config.program
        if file_identity(SETTING, program) != self._identity:
            raise ConfigError(
                f"{SETTING} {program!r}: its file has changed since the run began, and a process has to load it again: "
                "restore it, or resume the run with run.accept_changes"
            )
        try:
            await self._load(worker)
        except NotLoaded as error:
            raise ConfigError(f"{SETTING} {program!r} cannot be loaded:\n{error}") from error

    async def _load(self, worker: Worker) -> None:
        """Starts a process, again if it ends meanwhile: a machine without memory kills whatever starts."""
        for attempt in range(1, self._config.options.max_attempts):
            try:
                await worker.start()
                return
            except LoadingEnded as error:
                log.warning("%s, attempt %d to load it: %s", worker.name, attempt, error)
        await worker.start()


def program_worker(program: str) -> Worker:
    """A worker that runs a program's rollouts; code that one has left behind may block it as long as its end may."""
    return Worker(f"{SETTING} {program!r}", "async_rl.rollouts.agents.program_worker", program, END_GRACE_S)


async def run_program(
    worker: Worker, prompt: ProgramPrompt, session: RolloutSession, timeout_s: float
) -> RolloutResult:
    """See `Program.run`; cancelling it ends the rollout in the background."""
    turns = _Turns(worker, session)
    try:
        with worker.call(prompt, END_GRACE_S, turns.receive) as turns.call:
            await turns.call.wait(timeout_s, session.failed)
            if session.failed.done():
                raise session.failed.result()
            if not turns.call.ended.done():
                session.stop("time")
                await turns.call.end()
            return _result(turns.call, session)
    except CallInterrupted as error:
        raise ProgramInterrupted from error
    finally:
        turns.cancel()


def _result(call: Call, session: RolloutSession) -> RolloutResult:
    try:
        reward, turn_rewards = call.ended.result()
        return RolloutResult(reward, tuple(turn_rewards))
    except CallStuck:
        return RolloutResult()
    except CallFailed as error:
        text, is_limit = error.args
        if session.limit == "time" or (is_limit and session.limit is not None):
            # It was cancelled, or let the limit pass; whatever it raised then is no fault.
            return RolloutResult()
        raise ProgramFailed(f" failed:\n{text}") from error
    except CallCrashed as error:
        raise ProgramFailed(f": {error}") from error


class _Turns:
    """The turns of one rollout: its requests, and what the session makes of them."""

    call: Call

    def __init__(self, worker: Worker, session: RolloutSession) -> None:
        self._worker = worker
        self._session = session
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._num_refused = 0

    def receive(self, kind: str, request: int, *values: Any) -> None:
        if kind == "generate":
            self._requests[request] = asyncio.create_task(self._generate(request, values[0]))
        elif request in self._requests:
            self._requests[request].cancel()

    def cancel(self) -> None:
        for task in self._requests.values():
            task.cancel()

    async def _generate(self, request: int, arguments: dict[str, Any]) -> None:
        try:
            turn = await self._session.generate(**arguments)
        except AsyncRLError:
            # It stands in `session.failed`: the run ends.
            return
        except LimitReached as error:
            self._refuse("limit", request, error.limit, str(error))
        except SessionClosed as error:
            self._refuse("closed", request, str(error))
        except (InvalidRequest, TypeError) as error:
            self._refuse("invalid", request, str(error))
        except Exception as error:
            # Ours, not the program's: it ends the run.
            self._fail(error)
        else:
            self.call.tell("turn", request, turn)
        finally:
            self._requests.pop(request, None)

    def _refuse(self, kind: str, request: int, *values: Any) -> None:
        self._num_refused += 1
        if self._num_refused <= MAX_REFUSED:
            self.call.tell(kind, request, *values)
        elif not self.call.ended.done():
            self._fail(ProgramFailed(f": it asked for a turn {MAX_REFUSED:,} times in vain"))
            self._worker.kill()

    def _fail(self, error: Exception) -> None:
        if not self.call.ended.done():
            self.call.ended.set_exception(error)
