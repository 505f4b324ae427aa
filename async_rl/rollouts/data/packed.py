"""Arrays of numbers as text, for JSON."""

import base64
import zlib
from array import array
from typing import Any


def packed(values: "array[Any]") -> str:
    return base64.b64encode(zlib.compress(values.tobytes())).decode()


def unpacked(kind: Any, text: str) -> "array[Any]":
    values: array[Any] = array(kind)
    values.frombytes(zlib.decompress(base64.b64decode(text)))
    return values
