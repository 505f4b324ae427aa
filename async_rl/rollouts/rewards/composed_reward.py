"""A weighted sum of rewards, each in processes of its own."""

import asyncio
from collections.abc import Sequence

from async_rl.config.reward_section import RewardSection
from async_rl.errors import RewardError
from async_rl.method.types import CorrectAt, Prompt, Response, Scores
from async_rl.rollouts.rewards.base import as_rewards, gathered
from async_rl.rollouts.rewards.process_reward import ProcessReward
from async_rl.rollouts.rewards.row_parts import labels_of


class ComposedReward:
    """Implements `Reward` with the `[[reward.parts]]`: all of them, or those that a prompt's row names.

    A part that fails is tried again alone, as its settings say.
    """

    def __init__(self, config: RewardSection) -> None:
        self._config = config
        self._weights = config.weights
        self._parts = {
            label: ProcessReward(alone, label if label == alone.name else f"{label} ({alone.name})")
            for label, alone in config.single_rewards.items()
        }

    @property
    def correct_at(self) -> CorrectAt:
        """Of the parts that define it."""
        declared = {label: part.correct_at for label, part in self._parts.items()}
        return {label: threshold for label, threshold in declared.items() if threshold is not None} or None

    async def start(self) -> None:
        try:
            await gathered(part.start() for part in self._parts.values())
        except BaseException:
            await self.close()
            raise

    async def score(self, prompt: Prompt, responses: Sequence[Response]) -> Scores:
        try:
            labels = labels_of(self._config, prompt.row, prompt.reward)
        except ValueError as error:
            raise RewardError(f"prompt {prompt.prompt_id}: {error}") from error
        scored = await gathered(self._parts[label].score(prompt, responses) for label in labels)
        parts = tuple((label, scores.rewards) for label, scores in zip(labels, scored, strict=True))
        totals = [0.0] * len(responses)
        for label, rewards in parts:
            totals = [total + self._weights[label] * reward for total, reward in zip(totals, rewards, strict=True)]
        metrics = tuple(
            (f"{label}/{name}", values)
            for label, scores in zip(labels, scored, strict=True)
            for name, values in scores.metrics
        )
        try:
            return Scores(tuple(as_rewards(totals, len(responses))), parts, metrics)
        except ValueError as error:
            raise RewardError(f"prompt {prompt.prompt_id}: the sum of the parts of its reward: {error}") from error

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))
