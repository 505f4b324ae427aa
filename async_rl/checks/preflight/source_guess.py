"""What the first rows of a source show: which columns have prompts and answers, and which reward compares them.

For `async-rl init`; nothing here is configured, so it only proposes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

from async_rl.config.prompts_section import PromptsSection
from async_rl.errors import ConfigError
from async_rl.rollouts.data.formats import recognise
from async_rl.rollouts.data.part import parts_of
from async_rl.rollouts.data.row import Row, is_unicode
from async_rl.rollouts.data.task_rows import REASONING_GYM

NUM_ROWS = 2000
"""Enough for the length of prompts, few enough to be read at once."""

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "input", "text")
ANSWER_COLUMNS = ("answer", "answers", "answerKey", "ground_truth", "target", "label", "solution", "output")
"""Names that published data sets give them, the most common first."""

MATHEMATICAL = re.compile(r"(?=.*[\d\\])(?:\\[a-zA-Z]+|[^a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z]))+")
"""Digits or commands of LaTeX, and no words: letters only alone, as variables are."""

LETTER = re.compile(r"\(?[A-J]\)?\.?")
MIN_SHARE = 0.9
"""Of the answers that have to look alike before a reward is chosen by them."""


@dataclass(frozen=True, slots=True)
class SourceGuess:
    """What a source seems to be. `num_rows` counts up to `NUM_ROWS`; `longest_prompt` is a prompt's text.

    `columns` are those that the `prompts` section has to have. `reward` is None if no column has answers. `seen`
    says in words what was recognised, `names` are all columns; `has_messages`: a prompt is a list of chat messages.
    """

    num_rows: int
    longest_prompt: str
    columns: Mapping[str, str]
    reward: str | None
    seen: str
    names: tuple[str, ...]
    has_messages: bool = False


def guess_source(source: str, prompt_column: str | None = None) -> SourceGuess:
    """Reads the first rows of `source`, a value of prompts.source; `prompt_column` is known already, if given.

    Raises:
        ConfigError: it cannot be read, has no rows, or no column that could have prompts.
    """
    (part,) = parts_of(PromptsSection(source=source, prompts_per_batch=1, task_options={"size": NUM_ROWS}))
    try:
        rows = [row for _, row in islice(part.rows(seed=0).scan(), NUM_ROWS)]
    except OSError as error:
        raise ConfigError(f"{source!r} cannot be read: {error.strerror}; name another file") from error
    if not rows:
        raise ConfigError(f"{source!r} has no rows: each row needs a prompt")
    names = tuple(sorted({name for row in rows for name in row}))
    if prompt_column is not None:
        if not _is_prompt(rows[0].get(prompt_column)):
            raise ConfigError(
                f"{source!r} has no text or messages in column {prompt_column!r}: its columns are {', '.join(names)}"
            )
        return _look_at_columns(rows, names, prompt_column)
    if source.startswith(REASONING_GYM):
        return _look(rows, names, "question", {}, "reasoning_gym", "a reasoning-gym task")
    if (known := recognise(rows[0])) is not None:
        return _look(rows, names, known.columns["prompt"], {}, "math", f"the format of {known.name}")
    prompt = next((name for name in PROMPT_COLUMNS if _is_prompt(rows[0].get(name))), None)
    if prompt is None:
        raise ConfigError(
            f"{source!r} has the columns {', '.join(names)}, and none of {', '.join(PROMPT_COLUMNS)} with a text: give "
            "--prompt-column"
        )
    return _look_at_columns(rows, names, prompt)


def _look_at_columns(rows: Sequence[Row], names: tuple[str, ...], prompt: str) -> SourceGuess:
    answer = next((name for name in ANSWER_COLUMNS if name != prompt and rows[0].get(name) not in (None, "")), None)
    columns = {} if prompt == "prompt" else {"prompt": prompt}
    if answer is not None and answer not in ("answer", "answers", "answerKey"):
        columns["answer"] = answer
    reward = _reward_for([row.get(answer) for row in rows]) if answer is not None else None
    seen = f"prompts in column {prompt!r}, " + (f"answers in {answer!r}" if answer else "and no answers")
    return _look(rows, names, prompt, columns, reward, seen)


def _look(
    rows: Sequence[Row],
    names: tuple[str, ...],
    prompt: str,
    columns: dict[str, str],
    reward: str | None,
    seen: str,
) -> SourceGuess:
    """`prompt` is the column that has the prompts."""
    texts = [_text_of(row.get(prompt)) for row in rows]
    for number, text in enumerate(texts):
        if not is_unicode(text):
            raise ConfigError(
                f"row {number} of the data has half of a letter in its prompt (a lone surrogate, such as "
                '"\\ud800"), which is no text: correct it'
            )
    return SourceGuess(
        num_rows=len(rows),
        longest_prompt=max(texts, key=len),
        columns=columns,
        reward=reward,
        seen=seen,
        names=names,
        has_messages=any(isinstance(row.get(prompt), list) for row in rows),
    )


def _reward_for(answers: Sequence[Any]) -> str:
    """The built-in reward for such answers: one of choices, an expression, or a text."""
    texts = [str(answer).strip() for answer in answers if answer is not None]
    if _share(texts, LETTER) >= MIN_SHARE:
        return "multiple_choice"
    if _share(texts, MATHEMATICAL) >= MIN_SHARE and find_spec("math_verify") is not None:
        return "math"
    return "exact"


def _share(texts: Sequence[str], pattern: re.Pattern[str]) -> float:
    return sum(pattern.fullmatch(text) is not None for text in texts) / max(1, len(texts))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "content" in m for m in value)


def _text_of(prompt: Any) -> str:
    """A prompt's text, for its length; messages one after the other."""
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    return "" if prompt is None else str(prompt)
