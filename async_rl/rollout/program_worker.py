"""The worker process of a rollout program: `python -m async_rl.rollout.program_worker PROGRAM MARK_FD`.

Its main thread has an event loop on which all its rollouts run; another thread reads what the trainer sends. Any
exception of a rollout, `SystemExit` too, is its result. It imports the program and small shared types, and nothing of
the trainer; what it sends is JSON, which the trainer reads without executing anything.

Frames to the trainer: ["loaded"], ["not_loaded", text], ["generate", rollout, request, arguments],
["cancel", rollout, request], ["ended", rollout, kind, value]. Frames from it, pickled: ("begin", rollout, prompt),
("turn" | "limit" | "invalid" | "closed", rollout, request, ...), ("end", rollout).
"""

import asyncio
import contextvars
import itertools
import json
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from async_rl.errors import ConfigError
from async_rl.programs.user_file import find_file, is_async, load_from_file, traceback_from
from async_rl.programs.user_process import LENGTH, MAX_FRAME_BYTES, messages, take_pipes
from async_rl.rollout.messages import InvalidRequest, Message, Tool
from async_rl.rollout.program import ProgramPrompt, RolloutResult
from async_rl.rollout.program_mark import Mark
from async_rl.rollout.turn import LimitReached, SessionClosed, Turn

SETTING = "rollout.program"

MAX_OUTPUT_BYTES = 4 * 2**20
"""What a process may print in all; the rest is dropped."""

MAX_TRACEBACK = 20_000
"""Characters of the report of a failure: an error may quote a whole page, or megabytes."""

ROLLOUT: contextvars.ContextVar[int] = contextvars.ContextVar("rollout", default=0)
"""The rollout that the running code belongs to, in tasks that it has started, too."""


class Pipe:
    """To the trainer; used by all threads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, *frame: Any) -> None:
        message = json.dumps(frame).encode()
        if len(message) > MAX_FRAME_BYTES:
            raise ValueError(f"it has {len(message)} bytes, more than {MAX_FRAME_BYTES}")
        with self._lock:
            # A child made by fork has the pipe, but no business there.
            if os.getpid() == self._pid:
                self._file.write(LENGTH.pack(len(message)) + message)
                self._file.flush()


class MarkedStep(Coroutine[Any, Any, Any]):
    """A coroutine of a rollout: while it runs, the process is marked as running this rollout."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, mark: Mark) -> None:
        self._coro = coro
        self._number = number
        self._mark = mark
        self._pid = os.getpid()

    def send(self, value: Any) -> Any:
        return self._run(self._coro.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._run(self._coro.throw, kind if value is None else value)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def _run(self, step: Callable[[Any], Any], value: Any) -> Any:
        try:
            with self._mark.step(self._number):
                return step(value)
        except (SystemExit, KeyboardInterrupt) as error:
            # It would end the event loop, and with it the other rollouts.
            raise RuntimeError(f"{error!r} in a task of a rollout") from error
        finally:
            if os.getpid() != self._pid:
                os._exit(1)


class WorkerPolicy:
    """Implements `Policy` over the pipe."""

    def __init__(self, pipe: Pipe, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._pipe = pipe
        self._number = number
        self._loop = loop
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Turn]] = {}
        self._num_known = 0
        """Turns that the program has."""
        self._over: Exception | None = None

    async def generate(
        self,
        messages: Sequence[Message] | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        tools: Sequence[Tool] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "policy.generate belongs to the event loop that runs the program: from another thread, use "
                "asyncio.run_coroutine_threadsafe with that loop"
            )
        if self._over is not None:
            raise self._over
        arguments = {
            "messages": messages,
            "token_ids": None if token_ids is None else [operator.index(token) for token in token_ids],
            "tools": tools,
            "max_tokens": max_tokens,
            "stop": stop,
            "num_known": self._num_known,
        }
        request = next(self._requests)
        self._waiting[request] = future = self._loop.create_future()
        try:
            try:
                self._pipe.send("generate", self._number, request, arguments)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error
            turn: Turn = await future
            self._num_known += 1
            return turn
        except asyncio.CancelledError:
            self._pipe.send("cancel", self._number, request)
            raise
        finally:
            del self._waiting[request]

    def answer(self, kind: str, request: int, *values: Any) -> None:
        """Ends the wait for a request, if it still waits."""
        future = self._waiting.get(request)
        if future is None or future.done():
            return
        if kind == "turn":
            future.set_result(values[0])
            return
        error = {"limit": LimitReached, "closed": SessionClosed}.get(kind, InvalidRequest)(*values)
        future.set_exception(error)

    def end(self) -> None:
        """The rollout is over: whoever kept the policy, or waits for a turn of it, gets an error."""
        self._over = SessionClosed("the rollout has ended: its program gets no further turns")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._over)


class Worker:
    """Runs the rollouts of one process."""

    def __init__(self, function: Callable[..., Any], path: Path, requests: BinaryIO, pipe: Pipe, mark: Mark) -> None:
        self._function = function
        self._path = path
        self._requests = requests
        self._pipe = pipe
        self._mark = mark
        self._loop = asyncio.new_event_loop()
        self._policies: dict[int, WorkerPolicy] = {}
        self._main: dict[int, asyncio.Task[Any]] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}

    def serve(self) -> None:
        """Never returns; ends with the process, when the trainer's pipe ends."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_task_factory(self._make_task)
        threading.Thread(target=self._read, daemon=True).start()
        self._pipe.send("loaded")
        while True:
            try:
                self._loop.run_forever()
            except BaseException:
                # A callback raised `SystemExit`, or somebody stopped the loop: the rollouts go on.
                traceback.print_exc()

    def _read(self) -> None:
        """In a thread of its own, so that the end of the trainer is noticed while a rollout computes."""
        for frame in messages(self._requests):
            self._loop.call_soon_threadsafe(self._receive, *frame)
        os._exit(0)

    def _receive(self, kind: str, number: int, *values: Any) -> None:
        if kind == "begin":
            context = contextvars.copy_context()
            context.run(ROLLOUT.set, number)
            self._policies[number] = WorkerPolicy(self._pipe, number, self._loop)
            task = self._loop.create_task(self._run(number, *values), context=context)
            self._main[number] = task
            task.add_done_callback(lambda task: self._forget(number, task))
        elif kind == "end":
            if number in self._main:
                self._main[number].cancel()
        elif number in self._policies:
            self._policies[number].answer(kind, *values)

    async def _run(self, number: int, prompt: ProgramPrompt) -> None:
        try:
            result = RolloutResult.of(await self._function(prompt, self._policies[number]))
        except BaseException as error:
            kind = "limit" if _is_limit(error) else "failed"
            self._pipe.send("ended", number, kind, _shortened(traceback_from(self._path, error)))
        else:
            self._pipe.send("ended", number, "result", [result.reward, result.turn_rewards])

    def _forget(self, number: int, main: "asyncio.Task[Any]") -> None:
        del self._main[number]
        self._policies.pop(number).end()
        if main.cancelled():
            # Before its first step: it has sent nothing.
            self._pipe.send("ended", number, "failed", "it was cancelled before it began")
        for task in self._tasks.pop(number, ()):
            task.cancel()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        context: contextvars.Context | None = options.get("context")
        number = ROLLOUT.get() if context is None else context.run(ROLLOUT.get)
        task: asyncio.Task[Any] = asyncio.Task(MarkedStep(coro, number, self._mark), loop=loop, **options)
        if number:
            tasks = self._tasks.setdefault(number, set())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


def limit_output() -> None:
    """Passes on the first `MAX_OUTPUT_BYTES` that this process and its children print, and drops the rest."""
    read_end, write_end = os.pipe()
    true_output = os.dup(sys.stderr.fileno())
    os.dup2(write_end, sys.stdout.fileno())
    os.dup2(write_end, sys.stderr.fileno())
    os.close(write_end)

    def pass_on() -> None:
        left = MAX_OUTPUT_BYTES
        while chunk := os.read(read_end, 2**16):
            if left > 0:
                os.write(true_output, chunk[:left])
                left -= len(chunk)
                if left <= 0:
                    os.write(true_output, b"\n[a rollout program prints too much: the rest is dropped]\n")

    threading.Thread(target=pass_on, daemon=True).start()


def main(name: str, mark_fd: int) -> None:
    requests, output = take_pipes()
    pipe = Pipe(output)
    limit_output()
    try:
        path, _ = find_file(SETTING, name)
        function = load_from_file(SETTING, name)
        if not is_async(function):
            raise ConfigError(
                f"{SETTING} {name!r}: the function is not asynchronous, or a generator; write `async def`, without "
                "`yield`"
            )
    except Exception as error:
        pipe.send("not_loaded", str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
        return
    Worker(function, path, requests, pipe, Mark(mark_fd)).serve()


def _is_limit(error: BaseException) -> bool:
    """Whether a program let `LimitReached` pass, possibly within an error that it caused, or a group of errors."""
    waiting: list[BaseException] = [error]
    # Causes may be many, and form a circle.
    seen: list[BaseException] = []
    while waiting:
        error = waiting.pop()
        if isinstance(error, LimitReached):
            return True
        if any(error is other for other in seen):
            continue
        seen.append(error)
        waiting += error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        waiting += () if error.__cause__ is None else (error.__cause__,)
    return False


def _shortened(text: str) -> str:
    """The text without its middle, if it is so long that nobody reads it."""
    half = MAX_TRACEBACK // 2
    return text if len(text) <= MAX_TRACEBACK else f"{text[:half]}\n[...]\n{text[-half:]}"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
