"""Scores groups in worker processes, so that no reward can block or crash the trainer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.rewards.base import as_rewards
from async_rl.rewards.function import Traits
from async_rl.rewards.worker_process import (
    WorkerDied,
    WorkerFailed,
    WorkerProcess,
    WorkerStopped,
    WorkerTimeout,
)
from async_rl.types import Prompt, Response, Scores


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


log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A worker imports the reward's packages; on a cold disk that takes long."""

RETRY_PAUSE_S = 0.5
"""Before the second attempt, and twice as long before each further one: a service that the reward calls may recover."""


class _Worker:
    """A worker process, its number of running calls, and when it was last used."""

    def __init__(self, config: RewardSection) -> None:
        self.process = WorkerProcess(config)
        self.starting = asyncio.Lock()
        self.num_calls = 0
        self.last_used = 0


class ProcessReward:
    """Implements `Reward` with `reward.num_workers` processes.

    A synchronous function has one call per process, an asynchronous one `reward.max_concurrency` calls in total. A
    process that does not end a call is killed and restarted; its other calls are repeated.
    """

    def __init__(self, config: RewardSection, name: str) -> None:
        self._config = config
        self._name = name
        self._max_attempts = config.max_attempts
        self._traits: Traits | None = None
        self._workers: list[_Worker] = []
        self._slots = Slots(1)
        self._num_uses = 0

    @property
    def correct_at(self) -> float | None:
        assert self._traits is not None, "asked before the reward was started"
        return self._traits.correct_at if self._config.correct_at is None else self._config.correct_at

    async def start(self) -> None:
        if self._traits is not None:
            return
        self._workers = [_Worker(self._config) for _ in range(self._config.num_workers)]
        try:
            traits = await asyncio.gather(*(worker.process.start(START_TIMEOUT_S) for worker in self._workers))
        except WorkerFailed as error:
            raise ConfigError(f"reward {self._name!r} cannot be loaded:\n{error}") from error
        except (WorkerDied, WorkerTimeout) as error:
            raise ConfigError(f"reward {self._name!r} cannot be loaded: its worker process ended ({error})") from error
        self._traits = traits[0]
        self._slots = Slots(self._config.max_concurrency if self._traits.is_async else self._config.num_workers)

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        attempt = 1
        while True:
            try:
                return await self._attempt(prompt, tuple(responses))
            except _AttemptFailed as error:
                what = f"reward {self._name!r}, prompt {prompt.prompt_id}"
                if self._max_attempts > 1:
                    what += f", attempt {attempt} of {self._max_attempts}"
                if attempt == self._max_attempts:
                    raise RewardError(f"{what}{error}") from error
                log.warning("%s%s", what, error)
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            attempt += 1

    async def close(self) -> None:
        await asyncio.gather(*(worker.process.close() for worker in self._workers))

    async def _attempt(self, prompt: Prompt, responses: tuple[Response, ...]) -> Scores:
        """One call; repeated whenever its process was killed because of another call."""
        timeout_s = self._config.timeout_s
        try:
            while True:
                async with self._worker(len(responses)) as worker:
                    try:
                        scores = await worker.score(prompt, responses, timeout_s)
                        return Scores(tuple(as_rewards(scores.rewards, len(responses))), metrics=scores.metrics)
                    except WorkerStopped:
                        continue
        except WorkerTimeout as error:
            raise _AttemptFailed(f": no answer within reward.timeout_s = {timeout_s:g} s; {error}") from error
        except WorkerFailed as error:
            raise _AttemptFailed(f" failed:\n{error}") from error
        except WorkerDied as error:
            raise _AttemptFailed(
                f": its process ended ({error}); it, or a call beside it, may have crashed or called exit"
            ) from error

    @asynccontextmanager
    async def _worker(self, num_responses: int) -> AsyncIterator[WorkerProcess]:
        """The least busy process, running; of several, the most recently used one: its caches are warm."""
        num_slots = num_responses if self._traits is not None and self._traits.per_response else 1
        async with self._slots.taken(num_slots):
            worker = min(self._workers, key=lambda worker: (worker.num_calls, -worker.last_used))
            self._num_uses += 1
            worker.num_calls, worker.last_used = worker.num_calls + 1, self._num_uses
            try:
                async with worker.starting:
                    if not worker.process.running:
                        await worker.process.start(START_TIMEOUT_S)
                yield worker.process
            except asyncio.CancelledError:
                if self._traits is not None and not self._traits.is_async:
                    # It cannot be cancelled, and the next call needs a free process.
                    worker.process.kill()
                raise
            finally:
                worker.num_calls -= 1


class _AttemptFailed(Exception):
    """One call failed; the message continues after the names of reward and prompt."""
