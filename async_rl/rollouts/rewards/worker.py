"""The worker process of a reward: `python -m async_rl.rollouts.rewards.worker REWARD MARK`, its section as JSON.

It imports the reward and the shared types, and nothing of the trainer.
"""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.base import NotRewards, as_scores
from async_rl.rollouts.rewards.function import RewardTraits, load_function
from async_rl.shared.programs.user_file import traceback_of_user
from async_rl.shared.workers.child import Channel, Served, serve

Group = tuple[Prompt, tuple[Response, ...]]


def load(reward: str) -> Served:
    function = load_function(RewardSection.model_validate_json(reward))
    traits = RewardTraits.of(function)

    def scores(returned: object, responses: Sequence[Response]) -> list[Any]:
        found = as_scores(returned, len(responses))
        return [found.rewards, found.metrics]

    def score(group: Group, channel: Channel) -> list[Any]:
        prompt, responses = group
        return scores(function(prompt, responses, prompt.row), responses)

    async def score_async(group: Group, channel: Channel) -> list[Any]:
        prompt, responses = group
        return scores(await function(prompt, responses, prompt.row), responses)

    return Served(score_async if traits.is_async else score, traits.is_async, _described, astuple(traits))


def _described(error: BaseException) -> list[str]:
    """What is wrong with a call: what the function returned, or its traceback from its own frames on."""
    return [str(error) if isinstance(error, NotRewards) else traceback_of_user(error)]


if __name__ == "__main__":
    serve(load)
