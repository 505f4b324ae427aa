"""The forms of unit tests in rows, and how outputs are compared."""

import json
from typing import Any

import pytest

from async_rl.parts.sandbox.run_tests import same_output
from async_rl.parts.sandbox.unit_tests import AssertTests, InputOutputTests, unit_tests

PAIRS = InputOutputTests(("1\n", "2"), ("a", "b\n"))


@pytest.mark.parametrize(
    "row",
    [
        {"tests": {"inputs": ["1\n", "2"], "outputs": ["a", "b\n"]}},
        {"tests": json.dumps({"inputs": ["1\n", "2"], "outputs": ["a", "b\n"]})},
        {"input_output": json.dumps({"inputs": ["1\n", "2"], "outputs": ["a", "b\n"], "fn_name": None})},
        {"tests": [{"input": "1\n", "output": "a"}, {"input": "2", "output": "b\n", "testtype": "stdin"}]},
        {"tests": {"inputs": [["1", ""], 2], "outputs": ["a", ["b", ""]]}},
    ],
)
def test_inputs_and_outputs_of_programs(row: dict[str, Any]) -> None:
    assert unit_tests(row) == PAIRS


def test_assertions_with_what_runs_before_them() -> None:
    row = {"test_list": ["assert f() == N"], "test_setup_code": "N = 3", "test_imports": ["import math"]}
    assert unit_tests(row) == AssertTests("import math\nN = 3", ("assert f() == N",))
    assert unit_tests(
        {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
    ) == (unit_tests(row)), "lists may be JSON in a text"
    assert unit_tests({"test_list": ["assert f()"], "test_setup_code": None}) == AssertTests("", ("assert f()",))
    assert unit_tests({"test": "def check(f): ...", "entry_point": "f"}) == AssertTests(
        "def check(f): ...", ("check(__entry__)",), "f"
    )


@pytest.mark.parametrize("inputs", [[[1, "x"]], ['1\n"x"']])
def test_arguments_and_results_of_functions(inputs: list[Any]) -> None:
    tests = unit_tests({"tests": {"inputs": inputs, "outputs": ["[2]"], "fn_name": "f"}})
    assert isinstance(tests, AssertTests)
    assert tests.tests == ("check([1, 'x'], ['[2]', [2]])",)


CASE = {"input": '1\n"x"', "output": "[2]", "testtype": "functional"}


@pytest.mark.parametrize(
    "row",
    [
        {"tests": [CASE | {"metadata": {"func_name": "f"}}]},
        {"tests": json.dumps([CASE | {"metadata": json.dumps({"func_name": "f"})}]), "metadata": "of something else"},
        {"tests": [CASE], "metadata": '{"func_name": "f"}'},
        {"tests": [{"input": CASE["input"], "output": CASE["output"]}], "fn_name": "f"},
        {"tests": {"inputs": [CASE["input"]], "outputs": ["[2]"]}, "fn_name": "f"},
    ],
)
def test_a_list_of_calls_of_a_function_is_no_list_of_programs(row: dict[str, Any]) -> None:
    assert unit_tests(row) == unit_tests({"tests": {"inputs": [CASE["input"]], "outputs": ["[2]"], "fn_name": "f"}})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x"}, r"no unit tests \(it has \['prompt'\]\): expected one of: `tests`"),
        ({"tests": None, "test": "x"}, r"no unit tests"),
        ({"tests": "not json"}, "'tests' is a text, but no JSON"),
        ({"tests": 3}, "'tests' is 3: expected one of"),
        ({"tests": ["assert f()"]}, "'tests' is .*: expected one of"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": []}, "the row has no test"),
        ({"test_list": []}, "the row has no test"),
        ({"test_list": "3"}, "'test_list' is 3, expected a list"),
        ({"tests": [CASE]}, "'tests' call a function: name it"),
        ({"tests": [CASE | {"fn_name": "f"}, CASE | {"fn_name": "g"}]}, r"'tests' call \['f', 'g'\]: expected one"),
        ({"tests": [CASE | {"fn_name": "f"}, CASE | {"testtype": "stdin"}]}, r"'tests' call \['None', 'f'\]"),
        ({"tests": {"inputs": [1], "outputs": [1], "fn_name": "f()"}}, r"fn_name is 'f\(\)'"),
    ],
)
def test_a_row_without_tests_is_refused_with_what_it_has(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unit_tests(row)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n", True),
        ("a  b \nc\n", "a b\nc", True),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("0.1", "0.10000001", False),
        ("3", "3\n4", False),
        ("a\nb", "a b", False),
        ("\n3", "3", False),
        ("A", "a", False),
        ("", "", True),
        ("nan", "nan", True),
        ("inf", "1", False),
        ("", "0", False),
    ],
)
def test_outputs_are_the_same_but_for_space_and_how_numbers_are_written(
    printed: str, expected: str, same: bool
) -> None:
    assert same_output(printed, expected) is same
