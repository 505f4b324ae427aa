"""Values for the JSON schemas of an OpenAPI document: the smallest good one and many bad ones; for `fuzzing`."""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Text(NamedTuple):
    """JSON text that `json.dumps` would not write, or would write at length, and its value."""

    text: str
    value: Any

    def __repr__(self) -> str:
        return f"Text({self.text[:40]!r}, {len(self.text)} characters)"


NASTY: list[Any] = [
    *(None, True, 0, 1, -1, 1.5, -0.5, 2**63, -(2**63) - 1, 2**200),
    *("", "x", "\0", "\ud800", "é" * 10, "None", "1;--", "../../etc/passwd"),
    *([], [[]], [None], ["x"], [-1], [1.5], [{}], [[1, "x"]], {}, {"": 1}, {"x": {"y": []}}, {"\ud800": 1}),
    Text('"' + "y" * 100_000 + '"', "y" * 100_000),
    Text("9" * 4200, 10**4200 - 1),
    Text("9" * 5000, math.inf),
    Text("1e400", math.inf),
    Text("-1e999999999", -math.inf),
    Text("NaN", math.nan),
    Text("Infinity", math.inf),
    Text("-Infinity", -math.inf),
    Text("[" * 400 + "]" * 400, [[[[]]]]),
    Text("[" * 100_000 + "]" * 100_000, [[[[]]]]),
    Text('{"a":' * 900 + "1" + "}" * 900, {"a": {"a": {}}}),
]


class Schemas:
    """Resolves the schemas that a document's references name."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})

    def may_accept(self, schema: Mapping[str, Any], value: Any) -> bool:
        """Whether a server as lenient as pydantic might accept the value for this schema."""
        value = value.value if isinstance(value, Text) else value
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return any(self.may_accept(option, value) for option in schema["anyOf"])
        if "enum" in schema:
            return value in schema["enum"]
        check = _ACCEPTS.get(schema.get("type", ""))
        if check is not None:
            return check(schema, value)
        if schema.get("type") == "array":
            return (
                isinstance(value, list)
                and len(value) >= schema.get("minItems", 0)
                and all(self.may_accept(schema.get("items", {}), item) for item in value)
            )
        if schema.get("type") == "object":
            return isinstance(value, dict) and self._accepts_fields(schema, value)
        return True

    def _accepts_fields(self, schema: Mapping[str, Any], value: dict[str, Any]) -> bool:
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        extra = [item for name, item in value.items() if name not in known]
        return (
            all(name in value for name in schema.get("required", ()))
            and all(self.may_accept(known[name], item) for name, item in value.items() if name in known)
            and (not extra if more is False else more is True or all(self.may_accept(more, item) for item in extra))
        )

    def broken(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Values that the schema forbids, at the top level or at one nested position."""
        schema = self._resolved(schema)
        kinds = [
            st.sampled_from([value for value in NASTY if not self.may_accept(schema, value)] or [Text("nul", None)])
        ]
        options = [self._resolved(option) for option in schema.get("anyOf", [schema])]
        for option in options:
            if option.get("properties"):
                kinds += [self._broken_fields(option)] * 4
            elif "items" in option and len(options) == 1:
                kinds.append(self.broken(option["items"]).map(partial(_appended, self.minimal(option))))
        return st.one_of(kinds)

    def _broken_fields(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        whole = self.minimal(schema)
        kinds = [
            self.broken(field).map(partial(_replaced, whole, name))
            for name, field in schema["properties"].items()
            if any(not self.may_accept(field, value) for value in NASTY)
        ]
        kinds += [st.just({k: v for k, v in whole.items() if k != name}) for name in schema.get("required", ())]
        if schema.get("additionalProperties") is False:
            names = st.text(max_size=10).map(lambda text: f"x_{text}")
            kinds.append(st.builds(lambda name, value: {**whole, name: value}, names, st.sampled_from([1, "x", [0]])))
        return st.one_of(kinds)

    def minimal(self, schema: Mapping[str, Any]) -> Any:
        """The smallest value that the schema allows."""
        schema = self._resolved(schema)
        if "anyOf" in schema:
            return self.minimal(schema["anyOf"][0])
        if "enum" in schema:
            return schema["enum"][0]
        if schema.get("type") == "object":
            return {name: self.minimal(schema["properties"][name]) for name in schema.get("required", ())}
        if schema.get("type") == "array":
            return [self.minimal(schema["items"])] * schema.get("minItems", 0)
        number = max(schema.get("minimum", 0), schema.get("exclusiveMinimum", -1) + 1)
        word = "http://h" if "http" in schema.get("pattern", "") else "h" * max(1, schema.get("minLength", 0))
        return {"string": word, "boolean": False}.get(schema.get("type", ""), int(number))

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rsplit("/", 1)[1]]
        return schema


def dumps(value: Any) -> bytes:
    """JSON, in which every Text is written unchanged."""
    texts: list[str] = []

    def plain(item: Any) -> Any:
        if isinstance(item, Text):
            texts.append(item.text)
            return f"<text {len(texts) - 1}>"
        if isinstance(item, dict):
            return {name: plain(inner) for name, inner in item.items()}
        return [plain(inner) for inner in item] if isinstance(item, list) else item

    data = json.dumps(plain(value))
    return re.sub(r'"<text (\d+)>"', lambda match: texts[int(match[1])], data).encode()


def _accepts_integer(schema: Mapping[str, Any], value: Any) -> bool:
    number = _number(value)
    is_whole = isinstance(number, int) or (number is not None and number.is_integer())
    return number is not None and is_whole and _in_bounds(schema, number)


def _accepts_number(schema: Mapping[str, Any], value: Any) -> bool:
    number = _number(value)
    return number is not None and _in_bounds(schema, number)


def _accepts_string(schema: Mapping[str, Any], value: Any) -> bool:
    return (
        isinstance(value, str)
        and re.search(schema.get("pattern", ""), value) is not None
        and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
    )


def _accepts_boolean(schema: Mapping[str, Any], value: Any) -> bool:
    words = ("0", "1", "t", "f", "y", "n", "true", "false", "yes", "no", "on", "off")
    return value in (True, False) if not isinstance(value, str) else value.lower() in words


_ACCEPTS: dict[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "integer": _accepts_integer,
    "number": _accepts_number,
    "string": _accepts_string,
    "boolean": _accepts_boolean,
    "null": lambda schema, value: value is None,
}


def _number(value: Any) -> float | int | None:
    if isinstance(value, (bool, int, float)):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _in_bounds(schema: Mapping[str, Any], number: float) -> bool:
    # The document writes bounds as floats, which is not exact near 2**63: a value at an excluded maximum may pass.
    bounds: dict[str, Callable[[float], bool]] = {
        "minimum": lambda bound: number >= bound,
        "maximum": lambda bound: number <= bound,
        "exclusiveMinimum": lambda bound: number > bound,
        "exclusiveMaximum": lambda bound: number <= bound,
    }
    return all(holds(schema[name]) for name, holds in bounds.items() if name in schema)


def _appended(items: list[Any], item: Any) -> list[Any]:
    return [*items, item]


def _replaced(whole: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**whole, name: value}
