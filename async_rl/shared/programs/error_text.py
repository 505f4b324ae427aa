"""The texts of errors as commands show them; and texts of others, which must not control a terminal."""

import unicodedata

from async_rl.config.secrets import masked

MAX_CHARACTERS = 8000
"""Of an error: those of rewards and programs may quote whole responses."""

_KEPT = "\n\t\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Of characters that have no picture of their own; scripts and emoji need the joiners."""


def error_text(error: BaseException) -> str:
    """Without secrets, without control characters, and of bounded length."""
    text = harmless(str(masked("", str(error))))
    left_out = len(text) - MAX_CHARACTERS
    half = MAX_CHARACTERS // 2
    return text if left_out <= 0 else f"{text[:half]} ... ({left_out} characters) ... {text[-half:]}"


def harmless(text: str) -> str:
    """A text in which control characters but line ends and tabs are replaced; scripts and emoji stay."""
    plain = text.replace("\r\n", "\n")
    return "".join(char if _is_harmless(char) else "\N{REPLACEMENT CHARACTER}" for char in plain)


def one_line(text: str) -> str:
    """Text of others for one line: control characters and line ends are spaces."""
    return "".join(char if char.isprintable() else " " for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in _KEPT or unicodedata.category(char) == "Zs"
