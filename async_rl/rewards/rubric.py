"""What a judge is asked, and how its answer becomes a reward: pure functions of the settings, for `judge`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config.reward_section import RewardSection
from async_rl.errors import ConfigError
from async_rl.rewards.base import is_reward

RESPONSE = "{response}"

PLACEHOLDER = re.compile(r"\{(\w+)\}")

NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d++(?:\.\d*)?|\.\d++)(?!\w)")


def rubric_text(config: RewardSection) -> str:
    """`reward.rubric`, or the text of the file that it names.

    Raises:
        ConfigError: it is neither.
    """
    given = config.rubric
    if given is None:
        raise ConfigError(
            f"reward {config.name!r} needs a task: set reward.rubric to a text with {RESPONSE}, or to a file with one"
        )
    if RESPONSE in given:
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.rubric is {given!r:.200}: it is no text with {RESPONSE} in it, and cannot be read as a file: "
            f"{error}"
        ) from error
    if RESPONSE not in text:
        raise ConfigError(f"reward.rubric: the file {given!r} nowhere has {RESPONSE}, where the response goes")
    return text


@dataclass(frozen=True, slots=True)
class Rubric:
    """A task with placeholders, and the scale of its answers."""

    text: str
    score_pattern: re.Pattern[str] | None
    min_score: float
    max_score: float

    @classmethod
    def of(cls, config: RewardSection) -> "Rubric":
        """
        Raises:
            ConfigError: the task cannot be read, or the scale has no range.
        """
        if config.min_score >= config.max_score:
            raise ConfigError(
                f"reward.min_score is {config.min_score:g} and reward.max_score {config.max_score:g}: the first has to "
                "be less"
            )
        pattern = None if config.score_pattern is None else re.compile(config.score_pattern, re.DOTALL)
        return cls(rubric_text(config), pattern, config.min_score, config.max_score)

    def task(self, response: str, row: Mapping[str, Any]) -> str:
        """The text with the response and the row's columns in their places; braces around anything else stay.

        Raises:
            ValueError: the row lacks a column.
        """

        def fill(found: re.Match[str]) -> str:
            name = found[1]
            value = row.get(name)
            # NaN, which equals nothing, is how tables write that there is none.
            if name != "response" and (value is None or value != value):
                raise ValueError(f"reward.rubric has {{{name}}}, but the row has no value for it: it has {sorted(row)}")
            return response if name == "response" else _as_text(value)

        return PLACEHOLDER.sub(fill, self.text)

    def reward(self, answer: str) -> float | None:
        """The score in a judge's answer, from 0 (`min_score`) to 1 (`max_score`); None if it has none in that range."""
        number = self._score(answer)
        if number is None or not is_reward(number) or not self.min_score <= number <= self.max_score:
            return None
        return (number - self.min_score) / (self.max_score - self.min_score)

    @property
    def expects(self) -> str:
        """What an answer has to have, for an error."""
        where = "in its last line" if self.score_pattern is None else f"where {self.score_pattern.pattern!r} matches"
        return f"a number from {self.min_score:g} to {self.max_score:g} {where}"

    def _score(self, answer: str) -> float | None:
        if self.score_pattern is not None:
            found = [match[1] for match in self.score_pattern.finditer(answer)][-1:]
        else:
            last = next((line for line in reversed(answer.splitlines()) if line.strip()), "")
            # "7/10" is 7, if 10 is the best score.
            found = NUMBER.findall(re.sub(rf"(?:/|out of)\s*{re.escape(f'{self.max_score:g}')}(?!\.?\d)", "", last))
        try:
            return float(found[0]) if len(found) == 1 else None
        except (TypeError, ValueError):
            return None


def _as_text(value: Any) -> str:
    """A column: text as it is, chat messages one after the other, anything else as Python writes it."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping):
        return "\n\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in value)
    return str(value)
