"""A synchronous reward: scored in worker processes, so that it can neither hold up nor take down the trainer."""

import asyncio
from collections.abc import Sequence

from async_rl.errors import ConfigError, RewardError
from async_rl.rewards.base import as_rewards
from async_rl.rewards.worker_process import WorkerDied, WorkerFailed, WorkerProcess
from async_rl.types import Prompt, Response

START_TIMEOUT_S = 120.0
"""A worker imports the reward's packages; on a cold disk that takes long."""


class ProcessReward:
    """Implements `Reward` with `num_workers` processes; a hung or cancelled one is killed and started anew."""

    def __init__(self, name: str, timeout_s: float, num_workers: int) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._workers = [WorkerProcess(name) for _ in range(num_workers)]
        # The last one used comes first: it is awake and its caches are warm.
        self._idle: asyncio.LifoQueue[WorkerProcess] = asyncio.LifoQueue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def start(self) -> None:
        await asyncio.gather(*(self._start(worker) for worker in self._workers))

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        where = f"reward {self._name!r}, prompt {prompt.prompt_id}"
        worker = await self._idle.get()
        try:
            if not worker.running:
                await self._start(worker)
            async with asyncio.timeout(self._timeout_s) as limit:
                returned = await worker.score(prompt, tuple(responses))
            return as_rewards(returned, len(responses))
        except TimeoutError as error:
            assert limit.expired()
            raise RewardError(
                f"{where}: no answer within reward.timeout_s = {self._timeout_s:g} s; its process was killed"
            ) from error
        except WorkerFailed as error:
            raise RewardError(f"{where} failed:\n{error}") from error
        except WorkerDied as error:
            raise RewardError(f"{where}: its process ended ({error}); it may have crashed or called exit") from error
        finally:
            # Put back even when this call was cancelled: a killed worker starts again when it is next needed.
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _start(self, worker: WorkerProcess) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.start()
        except TimeoutError as error:
            raise RewardError(f"reward {self._name!r}: its process was not ready in {START_TIMEOUT_S:g} s") from error
        except WorkerFailed as error:
            raise ConfigError(f"reward {self._name!r} cannot be loaded in its worker process:\n{error}") from error
        except WorkerDied as error:
            raise ConfigError(f"reward {self._name!r}: its worker process ended at start ({error})") from error
