"""Values as JSON: plain data by value, everything else as the number of an object that stays where it is.

Only exact types are plain: an instance of a subclass could have an equality of its own.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_AS_THEY_ARE = (type(None), bool, int, float, str)
_COLLECTIONS: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def dumps(value: Any, keep: Callable[[Any], int]) -> str:
    """`keep` is given each object that is not plain, and returns its number."""
    return json.dumps(_encode(value, keep))


def loads(text: str | bytes, remote: Callable[[int], Any]) -> Any:
    """`remote` makes what stands for the object of a number."""
    return _decode(json.loads(text), remote)


def _encode(value: Any, keep: Callable[[Any], int]) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_encode(item, keep) for item in value]
    if kind is dict:
        return {"dict": [[_encode(key, keep), _encode(item, keep)] for key, item in value.items()]}
    for name, collection in _COLLECTIONS.items():
        if kind is collection:
            return {name: [_encode(item, keep) for item in value]}
    if kind is bytes:
        return {"bytes": value.decode("latin-1")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    return {"object": keep(value)}


def _decode(data: Any, remote: Callable[[int], Any]) -> Any:
    if type(data) is list:
        return [_decode(item, remote) for item in data]
    if type(data) is not dict:
        return data
    [(name, content)] = data.items()
    if name == "dict":
        return {_decode(key, remote): _decode(item, remote) for key, item in content}
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](_decode(item, remote) for item in content)
    if name == "bytes":
        return content.encode("latin-1")
    if name == "complex":
        return complex(*map(float, content))
    return remote(int(content))
