"""1 for a response that gives the letter of the right choice, else 0.

The letter is that in the last `\\boxed{}` of the response, else in its last `<answer>` tags, else after its last
"answer:" or "answer is", else all of it, else the only one in parentheses in its last line, else what it begins with.
The choice's own text will do as well.
"""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from async_rl.method.types import Prompt, Response
from async_rl.rollouts.rewards.answers import conclusion_of, normalize, tagged_in
from async_rl.rollouts.rewards.base import correct_at

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")

SAID = re.compile(r"\banswer\b[^\n:=]{0,40}?(?:\bis\b\s*[:=]?|[:=])", re.IGNORECASE)

MARKUP = re.compile(r"\\(?:text|mathrm|mathbf|textbf|text\w+)\s*\{([^{}]*)\}|[*_$`]")

ALONE = re.compile(r"[(\[]?(\w)[)\]]?[.:]?")

NAMED = r"(?i:option|choice)\s+[(\[]?([A-Za-z0-9])(?![\w'])"
"""`Option B`."""

ENDED = r"(?=[)\]]?\s*(?:[.,:;\n]|because\b|$))"
"""`Option B: Paris`, but not `Option B is wrong`."""

SMALL = r"[(\[]?([a-z])[)\].:](?=\s|$)"
"""`b) Paris`, but not `a friend` or `i.e.`"""

FIRST = re.compile(rf"{NAMED}|{SMALL}|[(\[]?([A-Z0-9])(?![\w'])(?!\.\d)")
"""A letter before other words: `B) Paris`, `B, because`."""

CAPITAL_SET_APART = r"[(\[]?([A-Z0-9])[)\].:](?!\d)"

FIRST_SET_APART = re.compile(rf"{NAMED}{ENDED}|{SMALL}|{CAPITAL_SET_APART}")
"""The same without a word for it before: `B) Paris`, but not `A friend`."""

FIRST_OF_SEVERAL = re.compile(CAPITAL_SET_APART)
"""Of a response that goes through the options, `Option A ... Option B ...`, or numbers its steps, `a) ... b) ...`."""

GONE_THROUGH = re.compile(rf"\b{NAMED}|(?<![\w.]){SMALL}")

IN_PARENTHESES = re.compile(r"\((\w)\)")

Choices = Mapping[str, str | None]
"""Label -> text, if it is known."""


@correct_at(1.0)
def score(prompt: Prompt, responses: Sequence[Response], row: Mapping[str, Any]) -> list[float]:
    """`row`: the right choice in `answer` or `answerKey`, and possibly `choices` or `options`; see `right_choice`."""
    choices = choices_of(row)
    right = right_choice(row, choices)
    return [float(chosen(response.text, choices) == right) for response in responses]


def choices_of(row: Mapping[str, Any]) -> Choices:
    """A list of texts, `{"label": [...], "text": [...]}`, or label -> text; without any, all letters without a text.

    Raises:
        ValueError: they are something else.
    """
    given = row.get("choices") if row.get("choices") is not None else row.get("options")
    if given is None:
        return dict.fromkeys(ascii_uppercase)
    labels: Sequence[Any] = ascii_uppercase
    if isinstance(given, Mapping):
        is_by_column = given.keys() >= {"label", "text"}
        labels, given = (given["label"], given["text"]) if is_by_column else (list(given), list(given.values()))
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not 2 <= len(given) <= len(labels) or not all(map(_is_choice, given)):
        raise ValueError(
            f"the row's choices are {given!r:.200}: expected a list of 2 to 26 texts, "
            '{"label": [...], "text": [...]}, or {label: text}'
        )
    return {str(label): str(text) for label, text in zip(labels, given, strict=False)}


def _is_choice(value: Any) -> bool:
    # NaN, which equals nothing, is how tables write that there is none.
    return isinstance(value, str | int | float) and value == value


def right_choice(row: Mapping[str, Any], choices: Choices) -> str:
    """The label of the right choice, which a row gives as its label, its text, or its index from 0.

    Raises:
        ValueError: it gives none of them.
    """
    given = row.get("answer") if row.get("answer") is not None else row.get("answerKey")
    labels = list(choices)
    if isinstance(given, int) and any(choices.values()) and 0 <= given < len(labels):
        return labels[given]
    found = _resolve(given, choices) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            f"the row's answer is {given!r:.200}: expected one of {', '.join(labels)} in 'answer' or 'answerKey', or "
            "the text or the index of one of the row's choices"
        )
    return found


def chosen(text: str, choices: Choices) -> str | None:
    """The label that a response gives, if any."""
    said = conclusion_of(text)
    if marked := BOXED.findall(said) or tagged_in(said):
        return _resolve(marked[-1], choices, FIRST)
    # Each is followed by what stands before the next one: a response may say it a thousand times.
    end = len(said)
    for found in reversed(list(SAID.finditer(said))):
        if label := _resolve(said[found.end() : end].strip().partition("\n")[0], choices, FIRST):
            return label
        end = found.start()
    if label := _resolve(said, choices):
        return label
    named = {_label(letter, choices) for letter in IN_PARENTHESES.findall(said.rpartition("\n")[2])} - {None}
    if len(named) == 1:
        return named.pop()
    several = {_label(one or other, choices) for one, other in GONE_THROUGH.findall(said)} - {None}
    return _resolve(said, choices, FIRST_SET_APART if len(several) < 2 else FIRST_OF_SEVERAL)


def _resolve(given: str, choices: Choices, first: re.Pattern[str] | None = None) -> str | None:
    """The label meant by a text: the label alone, a choice's text, or what `first` finds at its beginning."""
    plain = MARKUP.sub(r"\1", given).strip()
    if (alone := ALONE.fullmatch(plain)) and (label := _label(alone[1], choices)):
        return label
    normal = normalize(plain)
    same = [label for label, text in choices.items() if text is not None and normalize(text) == normal]
    if len(same) == 1:
        return same[0]
    found = first.match(plain) if first else None
    return _label(next(filter(None, found.groups())), choices) if found else None


def _label(letter: str, choices: Choices) -> str | None:
    return next((label for label in (letter, letter.upper(), letter.lower()) if label in choices), None)
