"""What a response gives as its answer, the answers that a row accepts, and how texts of both are compared."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from string import punctuation
from typing import Any

ANSWER_END = "</answer>"

TAGGED = re.compile(rf"<answer>(.*?){ANSWER_END}", re.DOTALL)

THOUGHTS, THOUGHTS_END = "<think>", "</think>"

PART_OF_NUMBER = re.compile(r"(?<!\w)-(?=\.?\d)|(?<=\de)-(?=\d)|(?<=\d)\.(?=\d)|(?<!\w)\.(?=\d)")
"""A sign or a decimal point: without it the number would be another one."""

BETWEEN_NUMBERS = re.compile(r"(?<=\d)(?!,(?:\d{2,3},){0,8}\d{3}(?!\d)|'\d{3}(?!\d))[^\w\s.]+?(?=[-.]?\d)")
"""Punctuation without which two numbers would become one: `3/4`, `10:30`, `(1,2)`; none that groups digits."""

ARTICLES = re.compile(r"\b(a|an|the)\b")


def conclusion_of(text: str) -> str:
    """What follows the thoughts of a response; nothing if these do not end."""
    said = text.rpartition(THOUGHTS_END)[2]
    return "" if THOUGHTS in said else said.strip()


def answer_of(text: str) -> str:
    """The text in the last `<answer>` tags of a response, else its conclusion."""
    said = conclusion_of(text)
    tagged = tagged_in(said)
    return (tagged[-1] if tagged else said).strip()


def tagged_in(text: str) -> list[str]:
    """All texts in `<answer>` tags."""
    # Without what follows the last end: from each of many beginnings it would be searched through for another one.
    before, end, _ = text.rpartition(ANSWER_END)
    return TAGGED.findall(before + end)


def accepted_answers(row: Mapping[str, Any]) -> list[str]:
    """The row's `answer` or `answers`: a text or a number, a list of them, or SQuAD's `{"text": [...]}`.

    Raises:
        ValueError: there are none.
    """
    given = row.get("answer") if row.get("answer") is not None else row.get("answers")
    if isinstance(given, Mapping):
        given = given.get("text")
    if isinstance(given, str) or not isinstance(given, Sequence):
        given = [] if given is None else [given]
    if not given or not all(map(_is_answer, given)):
        found = next((name for name in ("answer", "answers") if row.get(name) is not None), None)
        said = f"it has {sorted(row)}" if found is None else f"its {found!r} is {row[found]!r:.80}"
        raise ValueError(
            f"the row has no answer to compare with ({said}): expected a text or a list of texts in 'answer' or "
            "'answers'"
        )
    # Tables in which some rows have no number have all of them as floats: 42.0 is said as 42.
    whole = [str(int(answer)) for answer in given if isinstance(answer, float) and answer.is_integer()]
    return [*map(str, given), *whole]


def _is_answer(value: Any) -> bool:
    # NaN, which equals nothing, is how tables write that there is none.
    return isinstance(value, str | int | float) and value == value and str(value).strip() != ""


def single_answer(row: Mapping[str, Any]) -> Any:
    """The row's `answer`, as the reward `math` reads it.

    Raises:
        ValueError: there is none.
    """
    answer = row.get("answer")
    # NaN, which equals nothing, is how tables write that there is none.
    if answer is None or answer != answer:
        raise ValueError(f"the row has no 'answer' (it has {sorted(row)}): the math reward compares with it")
    return answer


def normalize(text: str) -> str:
    """SQuAD's normal form: lower case, without punctuation, articles and superfluous space.

    Departures: it is Unicode's lower case and punctuation, a number keeps its sign and decimal point, and two numbers
    stay two. A text of which nothing would be left (`+`, `The`) keeps all of it.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    plain = BETWEEN_NUMBERS.sub(" ", plain)
    kept = {found.start() for found in PART_OF_NUMBER.finditer(plain)}
    words = "".join(letter for i, letter in enumerate(plain) if i in kept or not _is_punctuation(letter))
    return " ".join(ARTICLES.sub(" ", words).split()) or " ".join(plain.split())


def _is_punctuation(letter: str) -> bool:
    return letter in punctuation or unicodedata.category(letter).startswith("P")
