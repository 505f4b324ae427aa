"""Scores groups in worker processes, so that no reward can block or crash the trainer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError, RewardError
from async_rl.method.types import Prompt, Response, Scores
from async_rl.rollouts.rewards.base import as_rewards
from async_rl.rollouts.rewards.function import RewardTraits
from async_rl.shared.workers.worker import CallCrashed, CallFailed, CallInterrupted, NotLoaded, Worker, WorkerPool


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

RETRY_PAUSE_S = 0.5
"""Before the second attempt, and twice as long before each further one: a service that the reward calls may recover."""

END_GRACE_S = 1.0
"""How long a call of an asynchronous function may take to end when it is cancelled; nothing ends a synchronous one."""


class NotInTime(Exception):
    """A call did not end in time; the message has its traceback, and what happened to its process."""


class ProcessReward:
    """Implements `Reward` with `reward.num_workers` processes.

    A synchronous function has one call per process, an asynchronous one `reward.max_concurrency` calls in total. A
    process that does not end a call is killed and restarted; its other calls are repeated.
    """

    def __init__(self, config: RewardSection, name: str) -> None:
        self._config = config
        self._name = name
        self._max_attempts = config.max_attempts
        self._traits: RewardTraits | None = None
        section = config.model_dump_json()
        workers = [
            Worker(f"reward {name!r}", "async_rl.rollouts.rewards.worker", section) for _ in range(config.num_workers)
        ]
        self._pool = WorkerPool(workers, Worker.start)
        self._slots = Slots(1)

    @property
    def correct_at(self) -> float | None:
        assert self._traits is not None, "asked before the reward was started"
        return self._traits.correct_at

    async def start(self) -> None:
        if self._traits is not None:
            return
        try:
            await self._pool.start()
        except NotLoaded as error:
            raise ConfigError(f"reward {self._name!r} cannot be loaded:\n{error}") from error
        self._traits = RewardTraits(*self._pool.workers[0].traits)
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
        await self._pool.close()

    async def _attempt(self, prompt: Prompt, responses: tuple[Response, ...]) -> Scores:
        """One call; repeated whenever its process was killed because of another call."""
        assert self._traits is not None, "scored before the reward was started"
        timeout_s, grace_s = self._config.timeout_s, END_GRACE_S if self._traits.is_async else 0.0
        try:
            while True:
                async with (
                    self._slots.taken(len(responses) if self._traits.per_response else 1),
                    self._pool.taken() as worker,
                ):
                    try:
                        with worker.call((prompt, responses), grace_s) as call:
                            await call.wait(timeout_s)
                            if not call.ended.done():
                                raise NotInTime(await call.end())
                            rewards, metrics = call.ended.result()
                    except CallInterrupted:
                        continue
                    named = tuple((name, tuple(values)) for name, values in metrics)
                    return Scores(tuple(as_rewards(rewards, len(responses))), metrics=named)
        except NotInTime as error:
            raise _AttemptFailed(f": no answer within reward.timeout_s = {timeout_s:g} s; {error}") from error
        except CallFailed as error:
            raise _AttemptFailed(f" failed:\n{error}") from error
        except (CallCrashed, NotLoaded) as error:
            raise _AttemptFailed(f": {error}") from error


class _AttemptFailed(Exception):
    """One call failed; the message continues after the names of reward and prompt."""
