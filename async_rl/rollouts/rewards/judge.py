"""A language model judges each response: chat completions of an OpenAI-compatible server, at temperature 0."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.reward_section import JudgeOptions, RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.base import PER_RESPONSE, correct_at
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.rubric import Rubric
from async_rl.rollouts.rewards.service import Service, ServiceFailed

MAX_ANSWERS = 3
"""How often a judge whose answer has no score is asked for a response."""

MAX_SHOWN = 500
"""Characters of an answer in an error: the last ones, where the score should be."""


def make_score(config: RewardSection) -> RewardFunction:
    """The judge at `reward.options.url`; called in the worker.

    Raises:
        ConfigError: the rubric or the token cannot be read.
    """
    judge = _Judge(config)

    async def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        return await judge.score(responses, row)

    setattr(score, PER_RESPONSE, True)
    threshold = config.read_options(JudgeOptions).correct_at
    return score if threshold is None else correct_at(threshold)(score)


class _Judge:
    def __init__(self, config: RewardSection) -> None:
        self._max_concurrency = config.max_concurrency
        self._options = options = config.read_options(JudgeOptions)
        self._rubric = Rubric(options)
        self._service = Service(options.url.rstrip("/") + "/chat/completions", options, config.timeout_s)

    async def score(self, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        """All responses at once, up to `reward.max_concurrency`."""
        deadline = self._service.deadline()
        slots = asyncio.Semaphore(self._max_concurrency)

        async def judge(task: str) -> float:
            async with slots:
                return await self._judge(task, deadline)

        tasks = [self._rubric.task(response.text, row) for response in responses]
        try:
            async with asyncio.TaskGroup() as siblings:
                judging = [siblings.create_task(judge(task)) for task in tasks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [each.result() for each in judging]

    async def _judge(self, task: str, deadline: float) -> float:
        body = {"model": self._options.model, "temperature": 0, "messages": [{"role": "user", "content": task}]}
        answer = ""
        for _ in range(MAX_ANSWERS):
            answer = self._content(await self._service.ask(body, deadline))
            reward = self._rubric.reward(answer)
            if reward is not None:
                return reward
        if self._options.unreadable_reward is not None:
            return self._options.unreadable_reward
        end = self._service.without_token(answer)[-MAX_SHOWN:]
        raise ServiceFailed(
            f"{self._service.url}: expected {self._rubric.expects}, but the judge's answer ends with "
            f"{end!r}: ask for it more clearly in reward.options.rubric, or set reward.options.unreadable_reward"
        )

    def _content(self, said: Any) -> str:
        """The text of a chat completion; empty for one that has none, as it was refused or cut short.

        Raises:
            ServiceFailed: it is something else.
        """
        try:
            content = said["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            raise ServiceFailed(
                f"{self._service.url}: expected a chat completion with choices[0].message.content, but it answered: "
                f"{self._service.without_token(repr(said)):.300}"
            ) from error
        return content if isinstance(content, str) else ""
