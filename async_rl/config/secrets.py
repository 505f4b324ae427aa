"""Masks what looks like a secret in what is shown: values and errors of a config, commands, the settings of a card, the
config that trackers get.

A config should have no secrets (`token_from` of a reward's options names where one is), but users put them into
environments, URLs and arguments all the same.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

MASK = "***"

PLACE_OF_TOKEN = r"^(env|file):.+$"
"""Where a token is: `env:VARIABLE` or `file:PATH`."""

_NAME = (
    r"(?:[a-z]*(?:token|secrets?|passwords?|passwd|passphrase)|pwd|pass|pat|credentials?|authorization|"
    r"(?:(?:api|access|private|secret|account|encryption|signing)[-_]?)?keys?)"
    r"(?:[-_]?v?\d{1,4}|[-_](?:base|base64|json|string|text|value))?"
)
"""After what is no letter: names may also run words together, as PGPASSWORD and clientSecret do, or be counted."""

_VARIABLE = (
    r"(?-i:(?:[A-Z0-9]+_)*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASS|KEY)"
    r"(?!_(?:PATH|FILE|DIR|FROM|ENV)\b)(?:_[A-Z0-9]+)+)"
)
"""Of the environment, where the word may stand anywhere: MY_TOKEN_X, AWS_ACCESS_KEY_ID."""

SECRET_NAME = re.compile(rf"(?:^|[^a-z]){_NAME}$|^{_VARIABLE}$", re.IGNORECASE)
"""A name whose value is a secret. It ends so: max_response_tokens and token_from do not."""

_IN_QUERY = r"(?:[\w.-]*(?:secret|passw|pwd|token|key|sig|auth|credential)[\w.-]*|code)"

_USER = r"[^\s:/@\"'=(,]+:[^\s/@\"']+"
"""NAME:PASSWORD, before an @ and a host, without a scheme."""

_KINDS = r"(?:file|env|python|command|hf|mailto)"
"""Words that say before a colon of what kind something is."""

_SECRETS = (
    # API_KEY=value, also after a comma or within a URL's query; "token": "value"; a list's '--token', 'value'.
    (re.compile(rf"((?<![a-z]){_NAME}=[\"']?)[^\s\"',&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(\b{_VARIABLE}=[\"']?)[^\s\"',&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"((?<![a-z]){_NAME}\\?[\"'] ?: ?\\?[\"'])[^\"'\\]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(rf"(--?(?:[\w-]*[-_])?{_NAME}[\"'], ?[\"'])[^\"']+", re.IGNORECASE), rf"\1{MASK}"),
    # In a URL's query, where nothing says how names are made: sas_key, X-Amz-Signature, sig, access_token_v2.
    (re.compile(rf"([?&]{_IN_QUERY}=)[^\s\"',&#]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(\bBearer )[^\s\"']+"), rf"\1{MASK}"),
    # Headers; in Authorization a word may say of which kind the secret is.
    (re.compile(r"(\b(?:authorization: ?(?:\w+ )?|x-api-key: ?))[^\s\"']+", re.IGNORECASE), rf"\1{MASK}"),
    # Users in URLs; a password may have an @, too.
    (re.compile(r"(?<=://)[^/?#\s]+(?=@)"), MASK),
    (re.compile(rf"(?<![^\s\"'=(,])(?!{_KINDS}:){_USER}(?=@[\w.-]+(?::\d+|/|[\s\"',)]|$))"), MASK),
    # The forms of well-known services' keys.
    (re.compile(r"\b(?:sk-|hf_|ghp_|gho_|glpat-|xox[a-z]-|AKIA)[A-Za-z0-9][A-Za-z0-9_-]{11,}"), MASK),
)


def masked(name: str, value: Any) -> Any:
    """A value of the config under its key's name, with secrets in it replaced, however deep."""
    # A token itself, in place of where it is, is a likely mistake.
    is_no_place = name.endswith("token_from") and not re.match(PLACE_OF_TOKEN, str(value))
    if value and (is_no_place or SECRET_NAME.search(name)):
        return MASK
    if isinstance(value, BaseModel):
        # A table of a list, such as one of `[[reward.parts]]`.
        value = value.model_dump(mode="json", exclude_defaults=True)
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
