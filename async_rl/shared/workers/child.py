"""Inside a worker process: loads a function and runs the calls that `worker.py`, its parent, sends.

A thread reads the parent's frames, so that its end is noticed while a call computes. Calls of a synchronous function
run one after the other in the main thread, since some limit themselves with signals; those of an asynchronous one all
at once, on an event loop there. Any exception of a call, `SystemExit` and a cancellation too, is its result.

Frames to the parent are JSON, which it reads without executing anything: ["loaded", traits], ["not_loaded", text],
["said", call, ...], ["returned", call, value], ["raised", call, ...], ["stuck", call, places]. Frames from it are
pickled: ("begin", call, value), ("tell", call, ...), ("end", call, grace in seconds).
"""

import asyncio
import contextvars
import json
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from async_rl.errors import ConfigError
from async_rl.shared.workers.process import LENGTH, MAX_FRAME_BYTES, Mark, take_pipes

PACKAGE = Path(__file__).parents[2]

CALL: contextvars.ContextVar[int] = contextvars.ContextVar("call", default=0)
"""The call that the running code belongs to, in tasks that it has started, too."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a process runs: `call(value, channel)`, whose result is sent as JSON.

    `described` has what the parent is told about an exception of a call. `traits` is for the parent, too. Where
    `ends_tasks`, the tasks that a call has started end with it.
    """

    call: Callable[[Any, "Channel"], Any]
    is_async: bool
    described: Callable[[BaseException], Sequence[Any]]
    traits: Any = None
    ends_tasks: bool = False


class Pipe:
    """To the parent; used by all threads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, *frame: Any) -> None:
        """
        Raises:
            TypeError, ValueError: it cannot be written as JSON, or is too long.
        """
        message = json.dumps(frame).encode()
        if len(message) > MAX_FRAME_BYTES:
            raise ValueError(f"it has {len(message)} bytes, more than {MAX_FRAME_BYTES}")
        with self._lock:
            # A child made by fork has the pipe, but no business there.
            if os.getpid() == self._pid:
                self._file.write(LENGTH.pack(len(message)) + message)
                self._file.flush()


class Channel:
    """What one call and the parent say to each other beside its value and its result."""

    def __init__(self, pipe: Pipe, number: int) -> None:
        self._pipe = pipe
        self._number = number
        self.receive: Callable[..., None] = lambda *values: None
        """Called on the event loop with what the parent tells."""

    def say(self, *values: Any) -> None:
        """Sends values to the parent; raises as `Pipe.send`."""
        self._pipe.send("said", self._number, *values)


class MarkedStep(Coroutine[Any, Any, Any]):
    """A coroutine of a call: while it runs, the process is marked as running this call."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, run: Callable[..., Any]) -> None:
        self._coro = coro
        self._number = number
        self._run = run

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._coro.throw, kind if value is None else value)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def _step(self, step: Callable[[Any], Any], value: Any) -> Any:
        try:
            return self._run(self._number, step, value)
        except (SystemExit, KeyboardInterrupt) as error:
            # It would end the event loop, and with it the other calls.
            raise RuntimeError(f"{error!r} in a task of a call") from error


class Child:
    """Runs the calls of this process."""

    def __init__(self, served: Served, requests: BinaryIO, pipe: Pipe, mark: Mark) -> None:
        self._served = served
        self._requests = requests
        self._pipe = pipe
        self._mark = mark
        self._pid = os.getpid()
        self._main_thread = threading.get_ident()
        self._channels: dict[int, Channel] = {}
        self._main: dict[int, asyncio.Task[None]] = {}
        self._tasks: dict[int, set[asyncio.Task[Any]]] = {}

    def serve(self) -> None:
        """Never returns; ends with the process, when the parent's pipe ends."""
        (self._serve_at_once if self._served.is_async else self._serve_in_turn)()

    def _serve_in_turn(self) -> None:
        frames: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._start(lambda *frame: frames.put(frame))
        while True:
            kind, number, *values = frames.get()
            if kind != "begin":
                continue
            try:
                result = self._run(number, self._served.call, values[0], Channel(self._pipe, number))
                self._pipe.send("returned", number, result)
            except BaseException as error:
                self._pipe.send("raised", number, *self._served.described(error))

    def _serve_at_once(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.set_task_factory(self._make_task)
        self._start(lambda *frame: loop.call_soon_threadsafe(self._receive, *frame))
        while True:
            try:
                loop.run_forever()
            except BaseException:
                # A callback raised `SystemExit`, or somebody stopped the loop: the calls go on.
                traceback.print_exc()

    def _start(self, receive: Callable[..., object]) -> None:
        """Reads frames in a thread of its own."""

        def read() -> None:
            for kind, number, *values in messages(self._requests):
                if kind == "end":
                    timer = threading.Timer(values[0], self._report_stuck, [number])
                    timer.daemon = True
                    timer.start()
                receive(kind, number, *values)
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        self._pipe.send("loaded", self._served.traits)

    def _report_stuck(self, number: int) -> None:
        """Says where the main thread is; the parent ignores that if the call has ended meanwhile."""
        self._pipe.send("stuck", number, places_of(self._main_thread))

    def _run(self, number: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """A step of a call; a process that it forked ends where it comes back."""
        self._mark.begin(number)
        try:
            return function(*arguments)
        finally:
            if os.getpid() != self._pid:
                os._exit(1)
            self._mark.end()

    def _receive(self, kind: str, number: int, *values: Any) -> None:
        if kind == "begin":
            context = contextvars.copy_context()
            context.run(CALL.set, number)
            channel = self._channels[number] = Channel(self._pipe, number)
            task = self._main[number] = asyncio.get_event_loop().create_task(
                self._call(number, values[0], channel), context=context
            )
            task.add_done_callback(lambda task: self._forget(number, task))
        elif kind == "end" and number in self._main:
            self._main[number].cancel()
        elif kind == "tell" and number in self._channels:
            self._channels[number].receive(*values)

    async def _call(self, number: int, value: Any, channel: Channel) -> None:
        try:
            self._pipe.send("returned", number, await self._served.call(value, channel))
        except BaseException as error:
            self._pipe.send("raised", number, *self._served.described(error))

    def _forget(self, number: int, main: "asyncio.Task[None]") -> None:
        del self._main[number], self._channels[number]
        if main.cancelled():
            # Before its first step: it has sent nothing.
            error = asyncio.CancelledError("it was cancelled before it began")
            self._pipe.send("raised", number, *self._served.described(error))
        for task in self._tasks.pop(number, ()):
            task.cancel()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> "asyncio.Task[Any]":
        context: contextvars.Context | None = options.get("context")
        number = CALL.get() if context is None else context.run(CALL.get)
        task: asyncio.Task[Any] = asyncio.Task(MarkedStep(coro, number, self._run), loop=loop, **options)
        if number and self._served.ends_tasks:
            tasks = self._tasks.setdefault(number, set())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task


def messages(requests: BinaryIO) -> Iterator[Any]:
    """The parent's messages until its end of the pipe closes, also in the middle of one, as where it was killed."""
    while len(header := requests.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(header)
        message = requests.read(length)
        if len(message) < length:
            return
        yield pickle.loads(message)


def places_of(thread: int) -> list[tuple[str, int | None, str]]:
    """Where a thread is, from the user's own frames on: the file, line and function of each frame."""
    frames = traceback.walk_stack(sys._current_frames()[thread])
    stack: list[tuple[str, int | None, str]] = [
        (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames
    ]
    stack.reverse()
    start = max((i + 1 for i, (file, *_) in enumerate(stack) if file == __file__), default=0)
    while start < len(stack) and Path(stack[start][0]).is_relative_to(PACKAGE):
        start += 1
    return stack[start:] or stack


def serve(load: Callable[[str], Served]) -> None:
    """The main program of a worker: `python -m MODULE ARGUMENT MARK`; `load` gets the argument."""
    requests, output = take_pipes()
    pipe = Pipe(output)
    try:
        mark = Mark(sys.argv[2])
        served = load(sys.argv[1])
    except Exception as error:
        pipe.send("not_loaded", str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
        return
    Child(served, requests, pipe, mark).serve()
