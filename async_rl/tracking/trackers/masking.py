"""A config as it may be shown to others: values that look like secrets are left out."""

import re
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(r"secret|password|passwd|token|credential|authorization|api_?key", re.IGNORECASE)
_LOCATION_NAME = re.compile(r"_(file|path|env|variable)$", re.IGNORECASE)
"""Of a key that says where a secret is."""

_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET_IN_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:secret|password|token|key|sig)[^=&\s]*)=[^&\s]+", re.IGNORECASE)


def masked(value: Any, name: str = "") -> Any:
    """Nested dicts, lists and values without text below names of secrets, and without credentials in URLs.

    Numbers stay: `max_response_tokens` is no secret.
    """
    if isinstance(value, dict):
        return {key: masked(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each, name) for each in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name) and not _LOCATION_NAME.search(name):
        return MASK
    return _SECRET_IN_QUERY.sub(rf"\1={MASK}", _USER_IN_URL.sub(MASK, value))
