"""1 for a response that matches a regular expression, else 0: of the config, or of each row.

A format is not an answer, so it declares no `correct_at`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from async_rl.config.reward_section import RegexOptions, RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.base import USED_SHARE
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.time_limit import SharedTime, scores_in_time


def make_score(config: RewardSection) -> RewardFunction:
    """The reward with the pattern of the config; called in the worker."""
    options = config.read_options(RegexOptions)

    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        pattern = _compiled(options.pattern) if options.pattern is not None else _pattern_of(row)
        matches = pattern.fullmatch if options.match == "full" else pattern.search
        # A pattern may backtrack for longer than a run lasts.
        time = SharedTime(USED_SHARE * config.timeout_s, len(responses))
        return scores_in_time(
            prompt,
            responses,
            time,
            lambda response: float(matches(response.text.strip()) is not None),
            f"the pattern {pattern.pattern!r} did not come to an end in time, which counts as no match: have it "
            "backtrack less",
        )

    return score


def _pattern_of(row: Mapping[str, Any]) -> re.Pattern[str]:
    if not isinstance(row.get("pattern"), str):
        raise ValueError(
            f"no reward.options.pattern is set, and the row has no text in 'pattern' (it has {sorted(row)}): give "
            "either"
        )
    try:
        return _compiled(row["pattern"])
    except re.error as error:
        raise ValueError(f"the row's pattern {row['pattern']!r:.200} is no regular expression: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
