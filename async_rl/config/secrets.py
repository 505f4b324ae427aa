"""Masks what looks like a secret in values that are shown: the config of `async-rl check`, and commands.

A config should have no secrets (`reward.token_from` names where one is), but users put them into environments, URLs and
arguments all the same.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

SECRET_NAME = re.compile(
    r"(?:^|[^a-z])(?:token|secrets?|passwords?|passwd|api[-_]?keys?|access[-_]?keys?|credentials?)$", re.IGNORECASE
)
"""A name whose value is a secret. It ends so: max_response_tokens and token_from do not."""

USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def masked(name: str, value: Any) -> Any:
    """A value of the config under its key's name, with secrets in it replaced, however deep."""
    if isinstance(value, Mapping):
        return {key: masked(str(key), inner) for key, inner in value.items()}
    if isinstance(value, str):
        if SECRET_NAME.search(name) and value:
            return MASK
        words = value.split(" ")
        return " ".join(masked_words(words)) if len(words) > 1 else masked_words(words)[0]
    if isinstance(value, tuple | list):
        if all(isinstance(item, str) for item in value):
            return masked_words(value)
        return [masked(name, item) for item in value]
    return value


def masked_words(words: Sequence[str]) -> list[str]:
    """Words of a command line: what follows --token, --token= and TOKEN=, and users in URLs."""
    shown: list[str] = []
    follows = False
    for word in words:
        name, equals, value = word.partition("=")
        is_secret = SECRET_NAME.search(name) is not None
        if follows:
            shown.append(MASK)
        elif is_secret and equals and value:
            shown.append(f"{name}={MASK}")
        else:
            shown.append(USER_IN_URL.sub(MASK, word))
        follows = is_secret and not equals and name.startswith("-")
    return shown
