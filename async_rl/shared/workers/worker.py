"""The trainer's side of worker processes: starts them, sends calls, receives what these say, and kills them.

What waits here: a call, for its result. It is woken by that, by the end of the process, or by its time limit. A call
that does not end when it is asked to then is killed with its process, and the other calls there are interrupted, to be
made again. Time in which the code of one call keeps the process from running the others does not count for those.
"""

import asyncio
import itertools
import json
import logging
import math
import pickle
import tempfile
import time
import traceback
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from async_rl.shared.workers.process import (
    LENGTH,
    MAX_FRAME_BYTES,
    Mark,
    cpu_s,
    exit_code,
    kill_group,
    reap,
    start_process,
)

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A worker imports the packages of the user's code; on a cold disk that takes long."""

PIPES_TIMEOUT_S = 0.5
"""How long the pipes of a killed process may take to end; a process that it started may keep them open."""

BLOCK_POLL_S = 0.25
"""How often it is looked which call keeps the process busy."""

SILENT_CPU_S = 2.0
"""Processor seconds in which a process that lets the interpreter go says where a call is; it takes milliseconds."""

SILENT_S = 20.0
"""The same in seconds: of a process that computes nothing, or that the machine does not get round to."""

SILENT_POLL_S = 0.25

MORE_ROOM = "raise the limits of open files and processes (ulimit -n, -u)"
"""The remedy for a process that cannot be started."""


class NotLoaded(Exception):
    """A process could not load what it is to run; the message says why."""


class LoadingEnded(NotLoaded):
    """It ended before it had loaded: because of the code, or of what happened on the machine."""


class CallFailed(Exception):
    """The call raised; its arguments are what the process has `described`."""


class CallStuck(Exception):
    """The call did not end when it was asked to; the message says where it was."""


class CallCrashed(Exception):
    """The process ended, or sent what no worker does, because of this call, or of any of those that it was running."""


class CallInterrupted(Exception):
    """The process was killed for another reason than this call, which has to be made again."""


class Call:
    """A call of a worker. `ended` is its result, or one of the exceptions above."""

    def __init__(
        self, worker: "Worker", process: Process, number: int, grace_s: float, receive: Callable[..., None]
    ) -> None:
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Nobody awaits the end of a call that was cancelled.
        self.ended.add_done_callback(lambda ended: ended.exception())
        self.receive = receive
        self.own_blocks_s = 0.0
        self._worker = worker
        self._process = process
        self._number = number
        self._grace_s = grace_s
        self._blocked_before_s = worker.blocked_s

    def tell(self, *values: Any) -> None:
        """Sends values to its `Channel`."""
        if self._process is self._worker.process:
            self._worker.send("tell", self._number, *values)

    async def wait(self, timeout_s: float, *others: "asyncio.Future[Any]") -> None:
        """Until it has ended, or one of the others, or it has had `timeout_s` in which its process could run it."""
        ends = {self.ended, *others}
        begun_s = time.monotonic()
        while not any(end.done() for end in ends):
            lost_s = self._worker.blocked_s - self._blocked_before_s - self.own_blocks_s
            left_s = begun_s + timeout_s + lost_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def end(self) -> str:
        """Ends it in `grace_s`, or kills its process; returns what became of it. `ended` is done then."""
        if self._process is self._worker.process:
            self._worker.send("end", self._number, self._grace_s)
        await self._answered()
        if not self.ended.done():
            self.ended.set_exception(CallStuck("it does not let the interpreter go"))
        error = self.ended.exception()
        if isinstance(error, CallStuck):
            if self._process is self._worker.process:
                log.warning("%s: a call did not end when it was asked to: %s", self._worker.name, error)
                self._worker.kill()
            return f"its process was killed; {error}"
        if isinstance(error, CallFailed):
            return f"it was stopped:\n{error}"
        return "it came just too late" if error is None else str(error)

    async def _answered(self) -> None:
        """Waits until it has ended, or its process has had the time to say where it is."""
        await asyncio.wait({self.ended}, timeout=self._grace_s)
        begun_s, begun_cpu_s = time.monotonic(), cpu_s(self._process)
        while not self.ended.done():
            await asyncio.wait({self.ended}, timeout=SILENT_POLL_S)
            if time.monotonic() - begun_s > SILENT_S or cpu_s(self._process) - begun_cpu_s > SILENT_CPU_S:
                return


class Worker:
    """One process with any number of calls.

    `name` is what it runs, for the log. Code that an ended call has left behind may block the process for
    `max_left_behind_s`.
    """

    def __init__(self, name: str, module: str, argument: str, max_left_behind_s: float = math.inf) -> None:
        self.name = name
        self.process: Process | None = None
        self.traits: Any = None
        """Of what it runs, once it has been started."""
        self.blocked_s = 0.0
        """Time in which single calls kept the process from running the others."""
        # What its pool knows of it.
        self.starting = asyncio.Lock()
        self.num_users = 0
        self.last_used = 0
        self._arguments = (module, argument)
        self._max_left_behind_s = max_left_behind_s
        self._loaded: asyncio.Future[Any] | None = None
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts the process and waits until it has loaded.

        Raises:
            NotLoaded, LoadingEnded: it could not.
        """
        self.kill()
        try:
            with tempfile.NamedTemporaryFile() as file:
                file.write(bytes(Mark.SIZE_BYTES))
                file.flush()
                mark = Mark(file.name)
                process = self.process = await start_process(*self._arguments, file.name)
                self._loaded = asyncio.get_running_loop().create_future()
                # Nobody awaits the start of a process that was killed meanwhile.
                self._loaded.add_done_callback(lambda loaded: loaded.exception())
                self._spawn(self._read(process, mark))
                self._spawn(self._watch(process, mark))
                try:
                    await asyncio.wait({self._loaded}, timeout=timeout_s)
                    if not self._loaded.done():
                        raise NotLoaded(f"it had not loaded after {timeout_s:g} s")
                    self.traits = self._loaded.result()
                except BaseException:
                    await self.close()
                    raise
        except OSError as error:
            raise LoadingEnded(f"its process cannot be started: {error}; {MORE_ROOM}") from error

    @contextmanager
    def call(self, value: Any, grace_s: float, receive: Callable[..., None] = lambda *values: None) -> Iterator[Call]:
        """A call with `value`; one that has not ended by the end of the context is ended in the background.

        Args:
            grace_s: how long it may take to end when it is asked to.
            receive: gets the values that its `Channel` says.

        Raises:
            CallInterrupted: the process does not run.
        """
        if self.process is None or self.process.returncode is not None:
            raise CallInterrupted("its process had ended before")
        number = next(self._numbers)
        call = self._calls[number] = Call(self, self.process, number, grace_s, receive)
        call.ended.add_done_callback(lambda _: self._calls.pop(number, None))
        self.send("begin", number, value)
        try:
            yield call
        finally:
            if not call.ended.done():
                self._spawn(call.end())

    def send(self, *frame: Any) -> None:
        """Sends nothing to a process that has ended or is ending: its reader fails all calls."""
        if self.process is None or self.process.stdin is None or self.process.stdin.is_closing():
            return
        message = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        self.process.stdin.write(LENGTH.pack(len(message)) + message)

    def kill(self) -> None:
        """Kills the process and those it started, without waiting; its calls are interrupted."""
        process, self.process = self.process, None
        if process is not None:
            kill_group(process)
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(NotLoaded("its process was killed"))
        self._fail_all()

    async def close(self) -> None:
        """Kills the process and waits for its end, at most `REAP_TIMEOUT_S`, and for that of its pipes."""
        process = self.process
        self.kill()
        if process is not None:
            await reap(process)
        if self._background:
            # The event loop may be closed next, and open pipes could not be closed after it.
            _, late = await asyncio.wait(self._background, timeout=PIPES_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _fail_all(self, culprit: int | None = None, reason: str = "") -> None:
        """Ends all calls, which have to be made again; the reason is a failure of the culprit (0: of any of them)."""
        for number, call in list(self._calls.items()):
            if not call.ended.done():
                fails = culprit in (0, number)
                interrupted = "its process was killed because of another call"
                call.ended.set_exception(CallCrashed(reason) if fails else CallInterrupted(interrupted))

    async def _read(self, process: Process, mark: Mark) -> None:
        """Takes what the process sends, until it ends or sends what no worker does."""
        assert process.stdout is not None and process.stdin is not None
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
            process.stdin.close()
        if process is not self.process:
            return
        culprit, _ = mark.read()
        code = await exit_code(process)
        if process is not self.process:
            return
        self.process = None
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(LoadingEnded(f"its process ended with exit code {code}"))
        what = f"wrote into the trainer's pipe ({nonsense})" if nonsense else f"ended (exit code {code})"
        if culprit in self._calls:
            self._fail_all(culprit, f"its process {what} while it ran")
        else:
            self._fail_all(0, f"its process {what}; it, or a call beside it, has caused that")

    def _receive(self, kind: str, *values: Any) -> None:
        if self._loaded is not None and not self._loaded.done():
            if kind == "loaded":
                self._loaded.set_result(values[0])
            else:
                self._loaded.set_exception(NotLoaded(str(values[0])))
            return
        number, *rest = values
        call = self._calls.get(number)
        if call is None or call.ended.done():
            return
        if kind == "said":
            call.receive(*rest)
        elif kind == "returned":
            call.ended.set_result(rest[0])
        elif kind == "raised":
            call.ended.set_exception(CallFailed(*rest))
        elif kind == "stuck":
            # Not by the process: each line of a file that it read while a call computes would have to wait for that.
            frames = [traceback.FrameSummary(*place) for place in rest[0]]
            call.ended.set_exception(CallStuck(f"it was at:\n{''.join(traceback.format_list(frames))}"))

    async def _watch(self, process: Process, mark: Mark) -> None:
        """Measures how long single calls keep the process from running the others; at its end kills what it started,
        which may keep its output open and so hide its end."""
        before, since_s = mark.read(), time.monotonic()
        while True:
            polled_s = time.monotonic()
            await asyncio.sleep(BLOCK_POLL_S)
            if process is not self.process or process.returncode is not None:
                kill_group(process)
                return
            now = mark.read()
            number, _ = now
            if now != before or not number:
                before, since_s = now, time.monotonic()
                continue
            passed_s = time.monotonic() - polled_s
            self.blocked_s += passed_s
            if number in self._calls:
                self._calls[number].own_blocks_s += passed_s
            elif time.monotonic() - since_s > self._max_left_behind_s:
                log.warning("%s: code that a call left behind blocks its process, which is killed", self.name)
                self.kill()

    def _spawn(self, coro: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(coro)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class WorkerPool:
    """Several workers that run the same; `start` starts one of them."""

    def __init__(self, workers: Sequence[Worker], start: Callable[[Worker], Awaitable[None]]) -> None:
        self.workers = workers
        self._start = start
        self._num_uses = itertools.count(1)

    async def start(self) -> None:
        """Starts those that do not run, all at once; raises what starting raises."""
        await asyncio.gather(*map(self._started, self.workers))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[Worker]:
        """The least busy worker, running; of several, the most recently used one: its caches are warm."""
        worker = min(self.workers, key=lambda worker: (worker.num_users, -worker.last_used))
        worker.num_users, worker.last_used = worker.num_users + 1, next(self._num_uses)
        try:
            await self._started(worker)
            yield worker
        finally:
            worker.num_users -= 1

    async def close(self) -> None:
        """Kills all of them, as `Worker.close`."""
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def _started(self, worker: Worker) -> None:
        async with worker.starting:
            if not worker.running:
                await self._start(worker)
