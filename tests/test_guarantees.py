"""The table of guarantees in CONTRIBUTING.md against the tests that there are."""

import re
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.tiers import is_nightly

ROWS = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) ?\|$", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)
GUARANTEES = {row[0]: row[1:] for row in ROWS if "`tests/" in row[1]}


def paths(text: str) -> list[Path]:
    return [ROOT / path for path in re.findall(r"`(tests/[^`]*)`", text)]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_every_guarantee_has_tests_in_make_test(guarantee: str) -> None:
    usual, more = map(paths, GUARANTEES[guarantee])
    assert all(path.exists() for path in usual + more)
    for path in usual:
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        holding = [file for file in files if runs_in_make_test(file)]
        assert holding, f"{path} has no test that `make test` runs"


def runs_in_make_test(file: Path) -> bool:
    """Whether any of its tests does, as far as its text says."""
    text = file.read_text()
    if "mark.always" not in text and is_nightly(file, {"distributed"} if "mark.distributed" in text else set()):
        return False
    tests = re.findall(r"((?:^@.*\n)*)^(?:async )?def test_", text, flags=re.MULTILINE)
    return any("mark.nightly" not in marks for marks in tests)


def test_the_table_is_read() -> None:
    assert len(GUARANTEES) >= 15
