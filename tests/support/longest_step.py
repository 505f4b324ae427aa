"""What an event loop does at a time, measured from outside."""

import asyncio
import gc
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LongestStep:
    """The longest step of an event loop: what it keeps all others waiting for."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = self.own_s = self.collecting_s = 0.0
        self.what = ""
        self.steps_s: list[float] = []

    @contextmanager
    def watched(self) -> Iterator["LongestStep"]:
        """Times every step of all event loops meanwhile, and garbage collection, which is part of the steps."""
        run = Handle._run
        begun_s = collected_s = 0.0

        def timed(handle: Any) -> None:
            wall_s, cpu_s, before_s = time.perf_counter(), time.thread_time(), collected_s
            run(handle)
            wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
            self.steps_s.append(cpu_s)
            self.wall_s = max(self.wall_s, wall_s)
            self.cpu_s = max(self.cpu_s, cpu_s)
            own_s = cpu_s - (collected_s - before_s)
            if own_s > self.own_s:
                self.own_s, self.what = own_s, _name_of(handle)

        def collecting(phase: str, info: dict[str, int]) -> None:
            nonlocal begun_s, collected_s
            if phase == "start":
                begun_s = time.thread_time()
            else:
                collected_s += time.thread_time() - begun_s
                self.collecting_s = max(self.collecting_s, time.thread_time() - begun_s)

        # The loop's own debug mode measures as well, and makes every step slower.
        Handle._run = timed  # type: ignore[method-assign, assignment]
        gc.callbacks.append(collecting)
        try:
            yield self
        finally:
            Handle._run = run  # type: ignore[method-assign]
            gc.callbacks.remove(collecting)


def _name_of(handle: Any) -> str:
    """Which step it is; without `repr`, which changes what it shows: a response of aiohttp would lose its headers."""
    # A task is bound to its step.
    task = getattr(handle._callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', '')}"
    return str(getattr(handle._callback, "__qualname__", type(handle._callback)))
