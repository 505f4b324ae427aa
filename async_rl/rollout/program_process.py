"""The trainer's side of one worker process of a rollout program: its rollouts, and their turns.

What waits here: a rollout, for its result. It is woken by that, by the end of the process, by a failure of the pool, or
by its time limit. A program that does not end then is killed with its process, and the other rollouts of that process
are interrupted, to be run again. Time in which the code of one rollout keeps the process from running the others does
not count for those.
"""

import asyncio
import itertools
import json
import logging
import os
import pickle
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.programs.user_process import (
    LENGTH,
    MAX_FRAME_BYTES,
    MORE_ROOM,
    end_group_after,
    exit_code,
    kill_group,
    reap,
    start_process,
)
from async_rl.rollout.program import ProgramFailed, ProgramInterrupted, ProgramPrompt, RolloutResult
from async_rl.rollout.program_mark import Mark
from async_rl.rollout.session import InvalidRequest, LimitReached, RolloutSession, SessionClosed

log = logging.getLogger(__name__)

END_GRACE_S = 2.0
"""How long a program may take to end after it was cancelled: it may close connections, and return a reward."""

BLOCK_POLL_S = 0.25
"""How often it is looked which rollout keeps the process busy."""

MAX_REFUSED = 10_000
"""A program that asks so often in vain does nothing else."""


class NotLoaded(Exception):
    """The program could not be loaded; the message says why."""


class LoadingEnded(NotLoaded):
    """Its process ended before it had loaded: because of the program, or of what happened on the machine."""


@dataclass(eq=False)
class _Run:
    """A running rollout."""

    session: RolloutSession
    ended: "asyncio.Future[RolloutResult]"
    lost_before_s: float
    """What the process had lost to other rollouts when this one began."""
    own_blocks_s: float = 0.0
    requests: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)
    num_refused: int = 0


class ProgramProcess:
    """One worker process with any number of rollouts."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._process: Process | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._mark: Mark | None = None
        self._runs: dict[int, _Run] = {}
        self._numbers = itertools.count(1)
        self._blocked_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, timeout_s: float) -> None:
        """Starts the process and waits until it has loaded the program.

        Raises:
            NotLoaded, LoadingEnded: it could not.
        """
        self.kill()
        try:
            process = self._process = await self._start_process()
        except OSError as error:
            raise LoadingEnded(f"its process cannot be started: {error}; {MORE_ROOM}") from error
        assert self._mark is not None, "it is made with the process"
        self._loaded = asyncio.get_running_loop().create_future()
        self._reading = self._spawn(self._read(process, self._mark))
        self._spawn(self._watch(process, self._mark))
        self._spawn(end_group_after(process))
        try:
            await asyncio.wait({self._loaded}, timeout=timeout_s)
            if not self._loaded.done():
                raise NotLoaded(f"it had not loaded after {timeout_s:g} s")
            self._loaded.result()
        except BaseException:
            await self.close()
            raise

    async def run(self, prompt: ProgramPrompt, session: RolloutSession, timeout_s: float) -> RolloutResult:
        """See `Program.run`; cancelling it ends the rollout in the background."""
        if not self.running:
            raise ProgramInterrupted
        number = next(self._numbers)
        ended: asyncio.Future[RolloutResult] = asyncio.get_running_loop().create_future()
        # Nobody awaits the end of a rollout that was cancelled.
        ended.add_done_callback(lambda ended: ended.exception())
        run = self._runs[number] = _Run(session, ended, self._blocked_s)
        self._send("begin", number, prompt)
        try:
            await self._wait(run, timeout_s)
            if session.failed.done():
                raise session.failed.result()
            if not run.ended.done():
                session.stop("time")
                await self._end(number, run)
            return run.ended.result()
        finally:
            if run.ended.done():
                self._forget(number)
            else:
                self._spawn(self._end(number, run))

    def kill(self) -> None:
        """Kills the process and those it started, without waiting; its rollouts have to be run again."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(NotLoaded("its process was killed"))
        self._fail_all()

    async def close(self) -> None:
        """Kills the process and waits for its end, for a bounded time."""
        process = self._process
        self.kill()
        if process is not None:
            await reap(process)
        if self._reading is not None:
            # Until it has read the end of the pipe, which closes it.
            await asyncio.wait({self._reading}, timeout=END_GRACE_S)
        for task in self._background:
            task.cancel()

    async def _start_process(self) -> Process:
        self._mark, fd = Mark.make()
        try:
            return await start_process("async_rl.rollout.program_worker", self._program, str(fd), pass_fds=(fd,))
        finally:
            os.close(fd)

    async def _wait(self, run: _Run, timeout_s: float) -> None:
        """Until it has ended, the pool has failed, or it has had `timeout_s` in which its process could run it."""
        begun_s = time.monotonic()
        while not run.ended.done() and not run.session.failed.done():
            lost_s = self._blocked_s - run.lost_before_s - run.own_blocks_s
            left_s = begun_s + timeout_s + lost_s - time.monotonic()
            if left_s <= 0:
                return
            ends: set[asyncio.Future[Any]] = {run.ended, run.session.failed}
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self, number: int, run: _Run) -> None:
        """Cancels a rollout, and kills the process if that does not end it; `ended` is done then."""
        process = self._process
        self._send("end", number)
        await asyncio.wait({run.ended}, timeout=END_GRACE_S)
        if not run.ended.done():
            run.ended.set_result(RolloutResult())
            if process is self._process:
                log.warning("a rollout of %s did not end when it was cancelled: its process is killed", self._program)
                self.kill()
        self._forget(number)

    def _forget(self, number: int) -> None:
        run = self._runs.pop(number, None)
        for task in run.requests.values() if run is not None else ():
            task.cancel()

    def _fail_all(self, culprit: int | None = None, reason: str = "") -> None:
        """Ends all rollouts, which have to be run again; the reason is a failure of the culprit (0: of any of them)."""
        runs, self._runs = self._runs, {}
        for number, run in runs.items():
            for task in run.requests.values():
                task.cancel()
            if not run.ended.done():
                fails = culprit in (0, number)
                run.ended.set_exception(ProgramFailed(reason) if fails else ProgramInterrupted())

    def _send(self, *frame: Any) -> None:
        """Sends nothing to a process that has ended or is ending: its reader fails all rollouts."""
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            return
        message = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.write(LENGTH.pack(len(message)) + message)

    async def _read(self, process: Process, mark: Mark) -> None:
        """Takes what the process sends, until it ends or sends what no worker does."""
        assert process.stdout is not None
        nonsense: Exception | None = None
        try:
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                self._receive(*json.loads(await process.stdout.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            nonsense = error
            kill_group(process)
        finally:
            if process.stdin is not None:
                process.stdin.close()
        if process is not self._process:
            return
        culprit, _ = mark.read()
        code = await exit_code(process)
        self._process = None
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(LoadingEnded(f"its process ended with exit code {code}"))
        what = f"wrote into the trainer's pipe ({nonsense})" if nonsense else f"ended (exit code {code})"
        if culprit in self._runs:
            self._fail_all(culprit, f": its process {what} while it ran")
        else:
            self._fail_all(0, f": its process {what}; it, or a rollout beside it, has caused that")

    def _receive(self, kind: str, *values: Any) -> None:
        if self._loaded is not None and not self._loaded.done() and kind in ("loaded", "not_loaded"):
            if kind == "loaded":
                self._loaded.set_result(None)
            else:
                self._loaded.set_exception(NotLoaded(str(values[0])))
            return
        number, *rest = values
        run = self._runs.get(number)
        if run is None or run.ended.done():
            return
        if kind == "generate":
            request, arguments = rest
            run.requests[request] = self._spawn(self._generate(number, run, request, arguments))
        elif kind == "cancel":
            if rest[0] in run.requests:
                run.requests[rest[0]].cancel()
        elif kind == "ended":
            _set_result(run, *rest)

    async def _generate(self, number: int, run: _Run, request: int, arguments: dict[str, Any]) -> None:
        try:
            turn = await run.session.generate(**arguments)
        except AsyncRLError:
            # It stands in `session.failed`: the run ends.
            return
        except LimitReached as error:
            self._refuse(number, run, "limit", request, error.limit, str(error))
        except SessionClosed as error:
            self._refuse(number, run, "closed", request, str(error))
        except (InvalidRequest, TypeError) as error:
            self._refuse(number, run, "invalid", request, str(error))
        except Exception as error:
            # Ours, not the program's: it ends the run.
            if not run.ended.done():
                run.ended.set_exception(error)
        else:
            self._send("turn", number, request, turn)
        finally:
            run.requests.pop(request, None)

    def _refuse(self, number: int, run: _Run, kind: str, request: int, *values: Any) -> None:
        run.num_refused += 1
        if run.num_refused <= MAX_REFUSED:
            self._send(kind, number, request, *values)
        elif self._process is not None:
            process, self._process = self._process, None
            kill_group(process)
            self._fail_all(number, f": it asked for a turn {MAX_REFUSED:,} times in vain")

    async def _watch(self, process: Process, mark: Mark) -> None:
        """Measures how long single rollouts keep the process from running the others."""
        before = mark.read()
        since_s = 0.0
        while True:
            await asyncio.sleep(BLOCK_POLL_S)
            if process is not self._process or process.returncode is not None:
                return
            now = mark.read()
            number, _ = now
            if now != before or not number:
                before, since_s = now, 0.0
                continue
            since_s += BLOCK_POLL_S
            self._blocked_s += BLOCK_POLL_S
            if number in self._runs:
                self._runs[number].own_blocks_s += BLOCK_POLL_S
            elif since_s > END_GRACE_S:
                log.warning("code that a rollout of %s left behind blocks its process, which is killed", self._program)
                self.kill()

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(coro)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _set_result(run: _Run, kind: str, value: Any) -> None:
    if kind == "result":
        reward, turn_rewards = value
        run.ended.set_result(RolloutResult(reward, tuple(turn_rewards)))
    elif run.session.limit == "time" or (kind == "limit" and run.session.limit is not None):
        # It was cancelled, or let the limit pass; whatever it raised then is no fault.
        run.ended.set_result(RolloutResult())
    else:
        run.ended.set_exception(ProgramFailed(f" failed:\n{value}"))
