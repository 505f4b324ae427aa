"""How numbers are written in answers, plain or in LaTeX: what tells an answer from a computation that equals it."""

import re

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

LONGEST = 200
"""Letters of what may be a number; the value of a longer one is compared as that of any expression."""


def is_number(text: str) -> bool:
    """Whether it is one number, perhaps the right side of an equation, with a unit or a currency; no computation."""
    if len(text) > LONGEST:
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
