"""Masks what looks like a secret in what is shown: values and errors of a config, commands, the settings of a card.

A config should have no secrets (`reward.token_from` names where one is), but users put them into environments, URLs and
arguments all the same.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_NAME = (
    r"(?:token|secrets?|passwords?|passwd|pwd|pat|credentials?|authorization|(?:api|access|private|secret)[-_]?keys?)"
)

SECRET_NAME = re.compile(rf"(?:^|[^a-z]){_NAME}$", re.IGNORECASE)
"""A name whose value is a secret. It ends so: max_response_tokens and token_from do not."""

_SECRETS = (
    # API_KEY=value, also after a comma or within a URL's query; "token": "value"; a list's '--token', 'value'.
    (re.compile(rf"((?<![a-z]){_NAME}=[\"']?)[^\s\"',&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"((?<![a-z]){_NAME}\\?[\"'] ?: ?\\?[\"'])[^\"'\\]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(--?(?:[\w-]*[-_])?{_NAME}[\"'], ?[\"'])[^\"']+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"([?&](?:sig|signature|key|auth|code)=)[^\s\"',&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\bBearer )[^\s\"']+"), rf"\1{MASK}"),
    # Users in URLs.
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), MASK),
    # The forms of well-known services' keys.
    (re.compile(r"\b(?:sk-|hf_|ghp_|gho_|glpat-|xox[a-z]-|AKIA)[A-Za-z0-9][A-Za-z0-9_-]{11,}"), MASK),
)


def masked(name: str, value: Any) -> Any:
    """A value of the config under its key's name, with secrets in it replaced, however deep."""
    if SECRET_NAME.search(name) and value:
        return MASK
    if isinstance(value, Mapping):
        return {key: masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, str):
        # Once more as a whole: what follows Bearer is a word of its own.
        return masked_text(" ".join(masked_words(value.split(" "))))
    if isinstance(value, tuple | list):
        if all(isinstance(item, str) for item in value):
            return masked_words(value)
        return [masked(name, item) for item in value]
    return value


def masked_words(words: Sequence[str]) -> list[str]:
    """Words of a command line: what follows --token, and what `masked_text` replaces."""
    shown: list[str] = []
    follows = False
    for word in words:
        shown.append(MASK if follows else masked_text(word))
        follows = word.startswith("-") and "=" not in word and SECRET_NAME.search(word) is not None
    return shown


def masked_text(text: str) -> str:
    """A text, such as an error that quotes a config, with secrets in it replaced."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text
