"""A reward model behind HTTP: one request for each group, one reward per response in its answer.

Request: `{"prompt": {"id", "token_ids"}, "row": {...}, "responses": [{"text", "token_ids", "finish_reason"}, ...]}`.
Answer: `{"rewards": [float, ...]}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.config.reward_section import HTTPOptions, RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.base import as_rewards, correct_at
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.service import Service, ServiceFailed


def make_score(config: RewardSection) -> RewardFunction:
    """The reward of the service at `reward.options.url`; called in the worker.

    Raises:
        ConfigError: its token cannot be read.
    """
    options = config.read_options(HTTPOptions)
    service = Service(options.url, options, config.timeout_s)

    async def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        said = await service.ask(_request(prompt, responses, row), service.deadline())
        if not isinstance(said, dict) or "rewards" not in said:
            shown = service.without_token(repr(said))
            raise ServiceFailed(f'{service.url}: expected {{"rewards": [...]}}, but it answered: {shown:.300}')
        try:
            return as_rewards(said["rewards"], len(responses))
        except ValueError as error:
            raise ServiceFailed(f'{service.url}: in "rewards", {service.without_token(str(error))}') from None

    return score if options.correct_at is None else correct_at(options.correct_at)(score)


def _request(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": {"id": prompt.prompt_id, "token_ids": prompt.token_ids.tolist()},
        "row": dict(row),
        "responses": [
            {"text": each.text, "token_ids": each.token_ids.tolist(), "finish_reason": each.finish_reason}
            for each in responses
        ],
    }
