"""A reward that is a coroutine function: awaited on the producer's event loop."""

import asyncio
import traceback
from collections.abc import Sequence

from async_rl.errors import RewardError
from async_rl.rewards.base import as_rewards
from async_rl.rewards.function import RewardFunction
from async_rl.types import Prompt, Response


class AsyncReward:
    """Implements `Reward`. The function shares the loop with all rollouts, so it must not block."""

    def __init__(self, name: str, function: RewardFunction, timeout_s: float) -> None:
        self._name = name
        self._function = function
        self._timeout_s = timeout_s

    async def start(self) -> None:
        pass

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        where = f"reward {self._name!r}, prompt {prompt.prompt_id}"
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return as_rewards(await self._function(prompt, responses, prompt.row), len(responses))
        except Exception as error:
            if limit.expired():
                raise RewardError(f"{where}: no answer within reward.timeout_s = {self._timeout_s:g} s") from error
            raise RewardError(f"{where} failed:\n{traceback.format_exc()}") from error

    async def close(self) -> None:
        pass
