"""Scores groups in worker processes, so that no reward can block or crash the trainer."""

from collections.abc import Sequence

from async_rl.config.reward_section import RewardSection
from async_rl.errors import RewardError
from async_rl.method.types import Prompt, Response, Scores
from async_rl.rollouts.rewards.base import as_rewards
from async_rl.rollouts.rewards.function import RewardTraits
from async_rl.shared.workers.function import FunctionFailed, Limits, WatchedFunction


class ProcessReward:
    """Implements `Reward` with `reward.num_workers` processes; see `WatchedFunction`."""

    def __init__(self, config: RewardSection, name: str) -> None:
        limits = Limits("reward", config.timeout_s, config.num_workers, config.max_concurrency, config.max_attempts)
        section = config.model_dump_json()
        self._function = WatchedFunction(f"reward {name!r}", "async_rl.rollouts.rewards.worker", section, limits)

    @property
    def correct_at(self) -> float | None:
        return self._traits.correct_at

    async def start(self) -> None:
        await self._function.start()

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        num_slots = len(responses) if self._traits.per_response else 1
        value = (prompt, tuple(responses))
        try:
            rewards, metrics = await self._function.call(value, f"prompt {prompt.prompt_id}", num_slots)
        except FunctionFailed as error:
            raise RewardError(str(error)) from error
        named = tuple((name, tuple(values)) for name, values in metrics)
        return Scores(tuple(as_rewards(rewards, len(responses))), metrics=named)

    async def close(self) -> None:
        await self._function.close()

    @property
    def _traits(self) -> RewardTraits:
        assert self._function.traits is not None, "asked before the reward was started"
        return RewardTraits(*self._function.traits)
