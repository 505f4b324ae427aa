"""1 for a response that gives the row's `answer`, else 0: extracted and compared mathematically, by math-verify.

It takes the last expression of a text, evaluates it and compares values: alone, it would pay for `9 + 3` where 12 is
asked for. So where the row's answer is a number, a response has to give a number, too.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from math_verify import parse, verify

from async_rl.config.reward_section import RewardSection
from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import single_answer, tagged_in
from async_rl.rollouts.rewards.base import USED_SHARE, correct_at
from async_rl.rollouts.rewards.function import RewardFunction
from async_rl.rollouts.rewards.time_limit import SharedTime, TookTooLong, scores_in_time, time_limit

# It warns that its own limits are off: ours are for all that a response needs, its own for each comparison.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def make_score(config: RewardSection) -> RewardFunction:
    """The reward, with the time that a call has; called in the worker."""

    @correct_at(1.0)
    def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
        time = SharedTime(USED_SHARE * config.timeout_s, 1 + len(responses))
        gold_s = time.next_s()
        try:
            with time_limit(gold_s):
                gold = parsed_answer(row)
        except TookTooLong:
            raise ValueError(f"the row's answer {row['answer']!r:.200} could not be read in {gold_s:.3g} s") from None
        # A few letters may be a number of a billion digits.
        return scores_in_time(
            prompt,
            responses,
            time,
            lambda response: float(_gives(gold, response.text)),
            "its answer could not be compared in time, which counts as wrong",
        )

    return score


def _gives(gold: Sequence[Any], text: str) -> bool:
    # Also tags that hold nothing, as where the thoughts speak of them.
    for said in (*tagged_in(text)[-1:], text):
        if given := parse(said, parsing_timeout=None):
            break
    if _is_number(gold) and not (_is_number(given) and not is_part(_texts(given)[-1], said)):
        return False
    return bool(verify(gold, given, timeout_seconds=None))


def _is_number(parsed: Sequence[Any]) -> bool:
    return any(map(is_number, _texts(parsed)))


def _texts(parsed: Sequence[Any]) -> list[str]:
    """What was extracted, as it is written; math-verify gives it after its values."""
    return [each for each in parsed if isinstance(each, str)]


def parsed_answer(row: Mapping[str, Any]) -> list[Any]:
    """`row["answer"]`: an expression, plain or in LaTeX, with or without `$` or `\\boxed`; or GSM8K's `... #### 42`.

    Raises:
        ValueError: there is none.
    """
    answer = single_answer(row)
    # GSM8K's marker without anything after it marks nothing; `\$` is a currency and delimits nothing, `\!` is space.
    gold = str(answer).strip().removesuffix("####").rpartition("####")[2].replace("\\$", "").replace("\\!", "").strip()
    if gold.count("$") == 1:
        gold = gold.replace("$", "")
    # The parser finds expressions only in mathematical delimiters.
    parsed: list[Any] = parse(gold if "$" in gold or "\\boxed" in gold else f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the row's answer {answer!r:.200} is no mathematical expression")
    return parsed


_SIGN = r"[-+\u2212]?\s*"
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,|\\!|,\\!)\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_PART = rf"(?:\{{\s*{_SIGN}{_DIGITS}\s*\}}|\d)"
_FRACTION = rf"\\[dt]?frac\s*{_PART}\s*{_PART}"
_TIMES = r"\\times|\\cdot|\u00d7|\u00b7"

NUMBER = re.compile(
    rf"{_SIGN}(?:{_FRACTION}|{_DIGITS}(?:[eE][-+]?\d+|\s*{_FRACTION}|\s*/\s*{_DIGITS})?)"
    rf"(?:\s*(?:{_TIMES}|\*)\s*10\s*(?:\^|\*\*)\s*(?:\{{\s*{_SIGN}\d+\s*\}}|{_SIGN}\d+))?"
)
"""With a sign, groups of digits, as a decimal, a fraction, in LaTeX a mixed number, or times a power of ten."""

_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?")
_DECORATION = re.compile(
    r"\\(?:left|right|displaystyle|quad|degree)|\\(?:[!;: $%]|,(?!\d))|\^\s*\{?\s*\\circ\s*\}?"
    r"|[$%\u00b0\u20ac\u00a3~]|\*\*$"
)
_UNIT = re.compile(r"(?<=[\d}\s])\s*[a-zA-Z][a-zA-Z/ .]*(?:\^\s*\{?[23]\}?)?$")

_BEFORE = re.compile(
    rf"(?:[\d)}}]|\b[a-zA-Z])[ \t]*(?:[-+/^\u00f7]|(?<!\*)\*|{_TIMES}|\\div)[ \t]*\{{?$"
    r"|(?:\\sqrt|\u221a)[ \t]*\{?$|\([^()\n]*, ?$|\d:$|\d[.,]?$"
)
_AFTER = re.compile(
    rf"[ \t]*(?:!(?=[ \t]*[-+*/^=$\\)])|\^|(?:{_TIMES})[ \t]*\S|\*{{1,2}}[ \t]*\d|[-+/:][ \t]*\d|\\(?:pi|sqrt|div)"
    r"|[\u03c0\u221a\u00f7])|[.,]?\d|, \d|[eE][-+]?\d| \d+/\d"
)

NEAR = 40
"""Letters before a number that may make it a part of something."""

MAX_CHARACTERS = 200
"""Letters of what may be a number; the value of a longer one is compared as that of any expression."""


def is_number(text: str) -> bool:
    """Whether it is one number, perhaps the right side of an equation, with a unit or a currency; no computation."""
    if len(text) > MAX_CHARACTERS:
        return False
    said = _DECORATION.sub("", _WRAPPED.sub(r" \1", text.rpartition("=")[2]).strip())
    return any(NUMBER.fullmatch(form.strip().rstrip(".")) for form in (said, _UNIT.sub("", said)))


def is_part(number: str, text: str) -> bool:
    """Whether a number is in something larger wherever a text has it: `5!`, `(3, 4)`, `3 + 4`, `3\\pi`."""
    places = [(found.start(), found.end()) for found in re.finditer(re.escape(number), text)]
    return bool(places) and all(_is_part_at(text, *place) for place in places)


def _is_part_at(text: str, start: int, end: int) -> bool:
    while start and text[start - 1] == "$":
        start -= 1
    is_all = text[end:].strip() == "!" and not text[:start].strip()
    return is_all or bool(_AFTER.match(text, end) or _BEFORE.search(text, max(0, start - NEAR), start))
