"""The score that a reasoning-gym task gives an answer, by the task's own `score_answer`.

The answer is the text in the last `<answer>` tags of the response, else the whole response, stripped.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import reasoning_gym

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import tagged_in
from async_rl.rollouts.rewards.base import USED_SHARE, correct_at
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.task_answers import guard
from async_rl.rollouts.rewards.time_limit import SharedTime, scores_in_time


def make_score(config: RewardSection) -> RewardFunction:
    """The reward, with the time that a call has; called in the worker."""
    guard()

    @correct_at(1.0)
    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        """`row`: an entry of the task (question, answer, metadata), with its `task` and `task_options` if known."""
        task = row.get("task") or row.get("metadata", {}).get("source_dataset")
        if task is None:
            raise ValueError(f"the row names no task in 'task' or metadata.source_dataset (it has {sorted(row)})")
        dataset = _dataset(task, json.dumps(row.get("task_options", {}), sort_keys=True))
        time = SharedTime(USED_SHARE * config.timeout_s, len(responses))
        # An answer to a task of arithmetic may be a power with a billion digits.
        return scores_in_time(
            prompt,
            responses,
            time,
            lambda response: _score(dataset, _answer(response.text), row),
            "its answer could not be scored in time, which counts as wrong",
        )

    return score


def _score(dataset: Any, answer: str, row: Mapping[str, Any]) -> float:
    """The task's score; 0 for an answer that it cannot read, where others return that.

    Raises:
        Exception: of any type: it is the row that the task cannot read, since it does not even score the row's answer.
    """
    try:
        return float(dataset.score_answer(answer, dict(row)))
    except Exception:
        dataset.score_answer(row.get("answer"), dict(row))
        return 0.0


def _answer(text: str) -> str:
    tagged = tagged_in(text)
    return (tagged[-1] if tagged else text).strip()


@cache
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))
