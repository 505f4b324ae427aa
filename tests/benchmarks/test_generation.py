"""The benchmark of generation runs, and reports both engines for each case."""

import argparse

import pytest

from benchmarks.common.case import Case
from benchmarks.generation import run


def test_each_case_has_both_and_their_ratio() -> None:
    case = Case.parse("tiny:40:2:2")
    found = run([case], repeats=1)
    assert found.keys() == {f"{what}.{case}" for what in ("engine", "generate", "ratio")}
    assert all(value > 0 for value in found.values())
    assert found[f"ratio.{case}"] == pytest.approx(found[f"generate.{case}"] / found[f"engine.{case}"], rel=0.02)


@pytest.mark.parametrize("text", ["", "tiny", "huge:1:1:1", "tiny:1:1", "tiny:1:x:1", "tiny:1:1:-1", "tiny:0:1:1"])
def test_a_case_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="SIZE:P:G:GROUPS"):
        Case.parse(text)


def test_a_case_is_written_as_it_is_read() -> None:
    assert str(Case.parse("31M:512:8:4")) == "31M:512:8:4"
    assert Case.parse("31M:512:8:4").num_responses == 32
