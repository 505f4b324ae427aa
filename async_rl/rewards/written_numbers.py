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
    r"|(?:\\sqrt|\u221a)[ \t]*\{?$|\d, ?$|\d:$"
)
_AFTER = re.compile(
    rf"[ \t]*(?:!|\^|(?:{_TIMES})[ \t]*\S|\*{{1,2}}[ \t]*\d|[-+/:][ \t]*\d|\\(?:pi|sqrt|div)|[\u03c0\u221a\u00f7])"
    r"|, ?\d|[eE][-+]?\d| \d+/\d"
)


NEAR = 40
"""Letters before a number that may make it a part of something."""


def is_number(text: str) -> bool:
    """Whether it is one number, perhaps the right side of an equation, with a unit or a currency; no computation."""
    said = _DECORATION.sub("", _WRAPPED.sub(r" \1", text.rpartition("=")[2]).strip())
    return any(NUMBER.fullmatch(form.strip().rstrip(".")) for form in (said, _UNIT.sub("", said)))


def is_part(number: str, text: str) -> bool:
    """Whether the last place of a number in a text is in something larger: `5!`, `(3, 4)`, `3 + 4`, `3\\pi`."""
    before, _, after = text.rpartition(number)
    return bool(_AFTER.match(after)) or bool(_BEFORE.search(before.rstrip("$")[-NEAR:]))
