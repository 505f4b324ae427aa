"""Which tests `make test` leaves to `make test-all`, and which come first."""

from functools import cache
from pathlib import Path

from tests.support import ROOT

LONG = ("e2e", "packaging", "benchmarks", "trainer/test_layouts.py", "multihost", "examples", "deploy")
"""What takes longest for one worker, which has a whole file to itself; the rest fills the time of the others."""

NIGHTLY = (
    *("benchmarks", "packaging", "multihost", "deploy/docker", "deploy/kubernetes", "deploy/ray", "deploy/slurm"),
    *("examples", "recipes", "e2e/test_readme.py", "e2e/test_tutorials.py"),
)
"""Whose tests of processes are left to `make test-all`: clusters, several hosts, benchmarks, and what the docs show."""

PROCESSES = {"distributed", "packaging"}

ALWAYS = "always"
"""Marks one of these tests that `make test` runs nevertheless."""


def is_nightly(path: Path, markers: set[str]) -> bool:
    """Whether a test in this file, with these markers, is left to `make test-all` because of its folder."""
    return bool(PROCESSES & markers) and ALWAYS not in markers and place_in(NIGHTLY, path) < len(NIGHTLY)


@cache
def place_in(names: tuple[str, ...], path: Path) -> int:
    """The number of the first of these files and folders in which it is; their count, if it is in none."""
    return next((i for i, name in enumerate(names) if path.is_relative_to(ROOT / "tests" / name)), len(names))
