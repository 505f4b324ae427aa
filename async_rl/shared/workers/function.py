"""A user's function in processes of its own, with a time limit, and tried again: rewards, and nodes of a pipeline."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from async_rl.errors import ConfigError
from async_rl.shared.workers.worker import CallCrashed, CallFailed, CallInterrupted, NotLoaded, Worker, WorkerPool

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Before the second attempt, and twice as long before each further one: a service that is called may recover."""

END_GRACE_S = 1.0
"""How long a call of an asynchronous function may take to end when it is cancelled; nothing ends a synchronous one."""


class NotInTime(Exception):
    """A call did not end in time; the message has its traceback, and what happened to its process."""


class FunctionFailed(Exception):
    """All attempts of a call failed; the message names the function, what it was called with, and the last failure."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a function's calls; `section` is where they are set, for errors."""

    section: str
    timeout_s: float
    num_workers: int
    max_concurrency: int
    max_attempts: int


class Slots:
    """A number of slots, taken in order of arrival; a call may take several."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._free = asyncio.Semaphore(number)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, number: int) -> AsyncIterator[None]:
        """Waits for `number` slots, or for all if there are fewer."""
        num_taken = 0
        try:
            # One after the other: two calls that have a part of their slots each would wait for each other forever.
            async with self._turn:
                for _ in range(min(number, self._number)):
                    await self._free.acquire()
                    num_taken += 1
            yield
        finally:
            for _ in range(num_taken):
                self._free.release()


class WatchedFunction:
    """A synchronous function has one call per process, an asynchronous one `max_concurrency` calls in total. A process
    that does not end a call is killed and restarted; its other calls are repeated.

    `module` is the worker's: its `Served.traits` begin with whether the function is asynchronous.
    """

    def __init__(self, name: str, module: str, argument: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        self._traits: Any = None
        self._pool = WorkerPool(
            [Worker(name, module, argument) for _ in range(limits.num_workers)],
            Worker.start,
        )
        self._slots = Slots(1)

    @property
    def traits(self) -> Any:
        """Those of the worker; None until it has been started."""
        return self._traits

    async def start(self) -> None:
        """Starts the processes and waits until they have loaded; a second call does nothing.

        Raises:
            ConfigError: it cannot be loaded.
        """
        if self._traits is not None:
            return
        try:
            await self._pool.start()
        except NotLoaded as error:
            raise ConfigError(f"{self._name} cannot be loaded:\n{error}") from error
        self._traits = self._pool.workers[0].traits
        self._slots = Slots(self._limits.max_concurrency if self._is_async else self._limits.num_workers)

    async def call(self, value: Any, what: str, num_slots: int = 1) -> Any:
        """The result of a call with `value`, as JSON has it; `what` names the value, for errors.

        Raises:
            FunctionFailed: it raised, hung or ended its process, as often as it is tried.
        """
        attempt = 1
        while True:
            try:
                return await self._attempt(value, num_slots)
            except _AttemptFailed as error:
                named = f"{self._name}, {what}"
                if self._limits.max_attempts > 1:
                    named += f", attempt {attempt} of {self._limits.max_attempts}"
                if attempt == self._limits.max_attempts:
                    raise FunctionFailed(f"{named}{error}") from error
                log.warning("%s%s", named, error)
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            attempt += 1

    async def close(self) -> None:
        """Ends the processes, within a few seconds whatever they do."""
        await self._pool.close()

    @property
    def _is_async(self) -> bool:
        return bool(self._traits[0])

    async def _attempt(self, value: Any, num_slots: int) -> Any:
        """One call; repeated whenever its process was killed because of another call."""
        assert self._traits is not None, f"{self._name} was called before it was started"
        timeout_s, grace_s = self._limits.timeout_s, END_GRACE_S if self._is_async else 0.0
        try:
            while True:
                async with self._slots.taken(num_slots), self._pool.taken() as worker:
                    try:
                        with worker.call(value, grace_s) as call:
                            await call.wait(timeout_s)
                            if not call.ended.done():
                                raise NotInTime(await call.end())
                            return call.ended.result()
                    except CallInterrupted:
                        continue
        except NotInTime as error:
            limit = f"{self._limits.section}.timeout_s = {timeout_s:g} s"
            raise _AttemptFailed(f": no answer within {limit}; {error}") from error
        except CallFailed as error:
            raise _AttemptFailed(f" failed:\n{error}") from error
        except (CallCrashed, NotLoaded) as error:
            raise _AttemptFailed(f": {error}") from error


class _AttemptFailed(Exception):
    """One call failed; the message continues after the names of the function and the value."""
