"""What a judge is asked, and how its answer becomes a reward: pure functions of the settings, for `judge`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.reward_section import JudgeOptions
from async_rl.errors import ConfigError
from async_rl.rollouts.rewards.base import is_reward

RESPONSE = "{response}"

PLACEHOLDER = re.compile(r"\{(\w+)\}")

NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d++(?:\.\d*)?|\.\d++)(?!\w)")


def rubric_text(given: str) -> str:
    """`rubric` of a judge's options, or the text of the file that it names.

    Raises:
        ConfigError: it is neither.
    """
    if RESPONSE in given:
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward.options.rubric is {given!r:.200}: it is no text with {RESPONSE} in it, and cannot be read as a "
            f"file: {error}"
        ) from error
    if RESPONSE not in text:
        raise ConfigError(f"reward.options.rubric: the file {given!r} nowhere has {RESPONSE}, where the response goes")
    return text


class Rubric:
    """A task with placeholders, and the scale of its answers."""

    def __init__(self, options: JudgeOptions) -> None:
        """
        Raises:
            ConfigError: the task cannot be read.
        """
        self.text = rubric_text(options.rubric)
        self._pattern = None if options.score_pattern is None else re.compile(options.score_pattern, re.DOTALL)
        self._min, self._max = options.min_score, options.max_score

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
                raise ValueError(
                    f"reward.options.rubric has {{{name}}}, but the row has no value for it: it has {sorted(row)}"
                )
            return response if name == "response" else _as_text(value)

        return PLACEHOLDER.sub(fill, self.text)

    def reward(self, answer: str) -> float | None:
        """The score in a judge's answer, from 0 (`min_score`) to 1 (`max_score`); None if it has none in that range."""
        number = self._score(answer)
        if number is None or not is_reward(number) or not self._min <= number <= self._max:
            return None
        return (number - self._min) / (self._max - self._min)

    @property
    def expects(self) -> str:
        """What an answer has to have, for an error."""
        where = "in its last line" if self._pattern is None else f"where {self._pattern.pattern!r} matches"
        return f"a number from {self._min:g} to {self._max:g} {where}"

    def _score(self, answer: str) -> float | None:
        if self._pattern is not None:
            found = [match[1] for match in self._pattern.finditer(answer)][-1:]
        else:
            last = next((line for line in reversed(answer.splitlines()) if line.strip()), "")
            # "7/10" is 7, if 10 is the best score.
            found = NUMBER.findall(re.sub(rf"(?:/|out of)\s*{re.escape(f'{self._max:g}')}(?!\.?\d)", "", last))
        try:
            return float(found[0]) if len(found) == 1 else None
        except (TypeError, ValueError):
            return None


def _as_text(value: Any) -> str:
    """A column: text as it is, chat messages one after the other, anything else as Python writes it."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value and isinstance(value[0], Mapping):
        return "\n\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in value)
    return str(value)
