"""The score that a reasoning-gym task gives an answer, by the task's own `score_answer`.

The answer is the text in the last `<answer>` tags of the response, else the whole response, stripped.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import reasoning_gym

from async_rl.rewards.base import correct_at
from async_rl.types import Prompt, Response

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@correct_at(1.0)
def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
    """`row`: an entry of the task (question, answer, metadata), with its `task` and `task_options` if known."""
    task = row.get("task") or row.get("metadata", {}).get("source_dataset")
    if task is None:
        raise ValueError(f"the row names no task in 'task' or metadata.source_dataset (it has {sorted(row)})")
    dataset = _dataset(task, json.dumps(row.get("task_options", {}), sort_keys=True))
    return [float(dataset.score_answer(_answer(response.text), dict(row))) for response in responses]


def _answer(text: str) -> str:
    tagged = ANSWER.findall(text)
    return (tagged[-1] if tagged else text).strip()


@cache
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **json.loads(options))
