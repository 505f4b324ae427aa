"""Texts of a form, in configs and in bodies of requests, and what is said of others."""

import re

from pydantic import AfterValidator
from pydantic_core import ErrorDetails


def matching(pattern: str, expected: str) -> AfterValidator:
    """Texts of which all matches the regular expression; others are an error that says what was `expected`."""
    whole = re.compile(pattern)

    def require(text: str) -> str:
        if not whole.fullmatch(text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(require)


def without_brackets(host: str) -> str:
    """An IPv6 address as sockets take it, of one that is written as in a URL: ::1 of [::1]."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def said_of(error: ErrorDetails) -> str:
    """What one of pydantic's errors says, without its prefix."""
    return error["msg"].removeprefix("Value error, ")
