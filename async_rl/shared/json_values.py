"""Values of rows as JSON, for programs and services that are told of them."""

import base64
import math
from collections.abc import Mapping
from typing import Any


def as_json(value: Any) -> Any:
    """A value of a row as JSON has it.

    Numbers that are none, which tables have for what is missing, are null; bytes are base64; what else JSON lacks is
    its text.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, str | int) else str(value)
