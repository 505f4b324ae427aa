"""The trainer's side of one worker process: starts it, sends calls, receives floats, kills it.

Messages are pickles; calls are numbered, so that many of them may run concurrently.

Every wait for a worker is bounded: by its result, the end of the process, or a timeout; a process that does not end a
call is killed with all processes that it started.
"""

import asyncio
import itertools
import pickle
import time
import traceback
from asyncio.subprocess import Process
from typing import Any, Literal

from async_rl.config.reward_section import RewardSection
from async_rl.programs.user_process import (
    LENGTH,
    MORE_ROOM,
    cpu_s,
    end_group_after,
    exit_code,
    kill_group,
    reap,
    start_process,
)
from async_rl.rewards.function import Traits
from async_rl.types import Prompt, Response, Scores

LOADED = 0
"""The number under which a worker reports that it has loaded its reward; calls have the following numbers."""

PIPES_TIMEOUT_S = 0.5
"""How long the pipes of a killed process may take to end; a process that it started may keep them open."""

SILENT_CPU_S = 2.0
"""Processor seconds in which a process that lets the interpreter go says where a call is; it takes milliseconds."""

SILENT_S = 20.0
"""The same in seconds: of a process that computes nothing, or that the machine does not get round to."""

SILENT_POLL_S = 0.25

Outcome = Literal["scored", "failed", "stuck"]
"""Of a call: its scores; its traceback; or, if it did not end when asked to, the `Place`s where it is."""

Place = tuple[str, int | None, str]
"""A file, its line and its function, as `traceback.FrameSummary` has them."""


class WorkerFailed(Exception):
    """The reward raised in the worker; the message is its traceback."""


class WorkerDied(Exception):
    """The process ended without a result."""


class WorkerTimeout(Exception):
    """A call did not end in time; the message has its traceback, and what happened to its process."""


class WorkerStopped(Exception):
    """The process was killed because of another call; this one has to be repeated."""


class WorkerProcess:
    """One worker with any number of calls; the caller must serialise calls that must not run concurrently."""

    def __init__(self, config: RewardSection) -> None:
        self._config = config
        self._process: Process | None = None
        self._calls: dict[int, asyncio.Future[tuple[Outcome, Any]]] = {}
        self._numbers = itertools.count(LOADED + 1)
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, timeout_s: float) -> Traits:
        """Starts the process and waits until it has loaded the reward.

        Raises:
            WorkerFailed, WorkerDied, WorkerTimeout: the reward could not be loaded.
        """
        self.kill()
        try:
            process = self._process = await start_process("async_rl.rewards.worker", self._config.model_dump_json())
        except OSError as error:
            raise WorkerDied(f"it cannot be started: {error}; {MORE_ROOM}") from error
        loaded = self._calls[LOADED] = asyncio.get_running_loop().create_future()
        self._spawn(self._read(process))
        self._spawn(end_group_after(process))
        try:
            await asyncio.wait({loaded}, timeout=timeout_s)
            if not loaded.done():
                raise WorkerTimeout(f"it had not loaded the reward after {timeout_s:g} s")
            traits: Traits = _answer(*loaded.result())
        except BaseException:
            await self.close()
            raise
        return traits

    async def score(self, prompt: Prompt, responses: tuple[Response, ...], timeout_s: float) -> Scores:
        """The reward function's result for the group; the timeout starts now.

        Cancelling it ends the call, so that it does not delay the next one.

        Raises:
            WorkerFailed, WorkerDied, WorkerTimeout, WorkerStopped: see there.
        """
        process = self._process
        if process is None:
            raise WorkerDied("it ended before the call began")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(number, (prompt, responses))
        try:
            await asyncio.wait({future}, timeout=timeout_s)
            if not future.done():
                raise WorkerTimeout(await self._end(process, number, future))
        except asyncio.CancelledError:
            self._spawn(self._end(process, number, future))
            raise
        self._calls.pop(number, None)
        scores: Scores = _answer(*future.result())
        return scores

    def kill(self) -> None:
        """Kills the process and those it started, without waiting; its other calls have to be repeated."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
        self._fail(WorkerStopped("its process was ended because of another call"))

    async def close(self) -> None:
        """Kills the process and waits for its end, at most `REAP_TIMEOUT_S`, and for that of its pipes."""
        process = self._process
        self.kill()
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            await reap(process)
        if self._background:
            # The event loop may be closed next, and open pipes could not be closed after it.
            _, late = await asyncio.wait(self._background, timeout=PIPES_TIMEOUT_S)
            for task in late:
                task.cancel()

    async def _end(self, process: Process, number: int, future: "asyncio.Future[tuple[Outcome, Any]]") -> str:
        """Ends a call that is not needed any more, or its process; returns where the call was."""
        if process is self._process:
            self._send(number, None)
        await _answered(process, future)
        self._calls.pop(number, None)
        if future.done() and future.exception() is None:
            outcome, answer = future.result()
            if outcome != "stuck":
                return f"it was stopped:\n{answer}" if outcome == "failed" else "it came just too late"
            # Not by the process: each line of a file that it read while a call computes would have to wait for that.
            frames = [traceback.FrameSummary(*place) for place in answer]
            where = f"it was at:\n{''.join(traceback.format_list(frames))}"
        else:
            where = "it does not let the interpreter go"
        if process is self._process:
            self.kill()
        return f"its process was killed; {where}"

    def _send(self, number: int, call: tuple[Prompt, tuple[Response, ...]] | None) -> None:
        """Sends nothing to a process that has ended or is ending: its reader fails all calls."""
        if self._process is None or self._process.stdin is None or self._process.stdin.is_closing():
            return
        message = pickle.dumps((number, call), protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.write(LENGTH.pack(len(message)) + message)

    async def _read(self, process: Process) -> None:
        """Passes the results of one process to the waiting calls, until it ends."""
        assert process.stdout is not None
        try:
            while True:
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                number, *answer = pickle.loads(await process.stdout.readexactly(length))
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result((answer[0], answer[1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        if process is self._process:
            code = await exit_code(process)
            self._process = None
            self._fail(WorkerDied(f"exit code {code}"))

    def _fail(self, error: Exception) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # the waiting call gets it; for an abandoned call this avoids asyncio's warning

    def _spawn(self, coro: Any) -> None:
        task = asyncio.create_task(coro)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _answered(process: Process, future: "asyncio.Future[Any]") -> None:
    """Waits until a call that was asked to end has an outcome, or its process has had the time to say where it is."""
    begun_s, begun_cpu_s = time.monotonic(), cpu_s(process)
    while not future.done():
        await asyncio.wait({future}, timeout=SILENT_POLL_S)
        if time.monotonic() - begun_s > SILENT_S or cpu_s(process) - begun_cpu_s > SILENT_CPU_S:
            return


def _answer(outcome: Outcome, answer: Any) -> Any:
    if outcome == "scored":
        return answer
    raise WorkerFailed(answer)
