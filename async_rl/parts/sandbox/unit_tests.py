"""The unit tests of a row, in the forms that public data sets use."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InputOutputTests:
    """Each input is what a program reads, each output what it has to print."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Each test is Python that raises unless the code is correct; `setup` runs before the first one.

    `entry` is the function that both call `__entry__`: it may have a name of Python's own.
    """

    setup: str
    tests: tuple[str, ...]
    entry: str | None = None

    def __len__(self) -> int:
        return len(self.tests)


UnitTests = InputOutputTests | AssertTests

EXPECTED = (
    "expected one of: `tests` or `input_output` with `inputs` and `outputs` (and `fn_name` for a function), or a list "
    "of `input` and `output` (and `metadata.func_name` for a function); `test_list` with assertions (and "
    "`test_setup_code`, `test_imports`); `test` with `entry_point`"
)


def unit_tests(row: Mapping[str, Any]) -> UnitTests:
    """The tests of a row; tests may be JSON in a text.

    Raises:
        ValueError: it has none, or none of a known form; names what it has.
    """
    found = _unit_tests(row)
    if not len(found):
        raise ValueError(f"the row has no test (it has {sorted(row)}): {EXPECTED}")
    return found


def _unit_tests(row: Mapping[str, Any]) -> UnitTests:
    for column in ("tests", "input_output"):
        if row.get(column) is not None:
            return _inputs_and_outputs(column, _parsed(column, row[column]), row)
    if row.get("test_list") is not None:
        setup = "\n".join([*_list(row, "test_imports"), str(row.get("test_setup_code") or "")])
        return AssertTests(setup, tuple(_list(row, "test_list")))
    if row.get("test") is not None and row.get("entry_point") is not None:
        return AssertTests(str(row["test"]), ("check(__entry__)",), str(row["entry_point"]))
    raise ValueError(f"the row has no unit tests (it has {sorted(row)}): {EXPECTED}")


def _list(row: Mapping[str, Any], column: str) -> list[str]:
    """Of lines of Python; empty where the row has none."""
    value = _parsed(column, row.get(column) or [])
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"the row's {column!r} is {value!r:.200}, expected a list: {EXPECTED}")
    return list(map(str, value))


def _parsed(column: str, value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"the row's {column!r} is a text, but no JSON ({error}): {EXPECTED}") from error


def _inputs_and_outputs(column: str, value: Any, row: Mapping[str, Any]) -> UnitTests:
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name") or row.get("fn_name")
    elif isinstance(value, Sequence) and all(map(_is_case, value)):
        inputs, outputs = [case["input"] for case in value], [case["output"] for case in value]
        function = _function_of_cases(column, value, row)
    else:
        raise ValueError(f"the row's {column!r} is {value!r:.200}: {EXPECTED}")
    if len(inputs) != len(outputs):
        raise ValueError(f"the row's {column!r} has {len(inputs)} inputs and {len(outputs)} outputs: give as many")
    if function is None:
        return InputOutputTests(tuple(map(_text, inputs)), tuple(map(_text, outputs)))
    if not str(function).isidentifier():
        raise ValueError(f"the row's fn_name is {function!r:.200}: expected the name of a function")
    return AssertTests(
        CHECK,
        tuple(
            f"check({_arguments(given)!r}, {_results(expected)!r})"
            for given, expected in zip(inputs, outputs, strict=True)
        ),
        str(function),
    )


def _is_case(value: Any) -> bool:
    return isinstance(value, Mapping) and {"input", "output"} <= value.keys()


def _function_of_cases(column: str, cases: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> str | None:
    """The function that a list of cases calls, as each of them or the row names it; None where they are of a program.

    Raises:
        ValueError: they are of several kinds, or call a function without a name.
    """
    kinds = {None if case.get("testtype") == "stdin" else _func_name(case) or _func_name(row) for case in cases}
    if len(kinds) > 1:
        raise ValueError(f"the row's {column!r} call {sorted(map(str, kinds))}: expected one function, or a program")
    (function,) = kinds or {None}
    if function is None and any(case.get("testtype") == "functional" for case in cases):
        raise ValueError(f"the row's {column!r} call a function: name it in their metadata.func_name, or in fn_name")
    return function


def _func_name(given: Mapping[str, Any]) -> str | None:
    """`fn_name` of a row or a test, or LiveCodeBench's `metadata.func_name`; metadata may be JSON in a text."""
    metadata = given.get("metadata")
    if isinstance(metadata, str):
        # Other data sets have other texts there.
        with suppress(ValueError):
            metadata = json.loads(metadata)
    named = given.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    return str(named) if named else None


CHECK = """
def plain(value):
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

def check(args, results):
    found = plain(__entry__(*args))
    assert found in results or [found] in results
"""
"""JSON has no tuples, and some data sets give a list of one result."""


def _text(value: Any) -> str:
    """An input or output, which some data sets give as a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or a text with one argument per line, as JSON."""
    if isinstance(given, str):
        return [_parsed("inputs", line) for line in given.splitlines() if line.strip()]
    return list(given)


def _results(expected: Any) -> list[Any]:
    """What a function may return; a text is meant as itself, or is JSON."""
    if not isinstance(expected, str):
        return [expected]
    try:
        return [expected, json.loads(expected)]
    except ValueError:
        return [expected]
