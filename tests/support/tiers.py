"""Which tests `make test` leaves to `make test-all`, and which come first."""

import random
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

LONG = (
    *("e2e/test_readme.py", "e2e", "trainer/test_layouts.py", "trainer/test_rollouts.py", "trainer/test_critic.py"),
    *("trainer/test_exact.py", "trainer/test_algorithms.py", "packaging", "benchmarks", "multihost", "examples"),
    *("deploy/ray", "deploy/slurm", "deploy/kubernetes", "deploy/docker", "recipes"),
)
"""What keeps both cores busy; most of the rest waits."""

NIGHTLY = (
    *("benchmarks", "packaging", "multihost", "deploy/docker", "deploy/kubernetes", "deploy/ray", "deploy/slurm"),
    *("examples", "recipes", "e2e/test_readme.py", "e2e/test_tutorials.py"),
)
"""Whose tests of processes are left to `make test-all`: clusters, several hosts, benchmarks, and what the docs show."""

PROCESSES = {"distributed", "packaging"}

ALWAYS = "always"
"""Marks one of these tests that `make test` runs nevertheless."""


OWN_LAYERS = ("qwen3", "qwen3_moe", "mistral", "gemma3_text", "deepseek_v3", "qwen3_next", "gpt_oss")
"""Families that have among them each kind of layer there is: the layers of the others are made of the same parts."""


def by_day(names: Iterable[str], chosen: Collection[str] = OWN_LAYERS) -> list[Any]:
    """Parameters, of which the chosen ones are for `make test`."""
    return [each if each in chosen else at_night(each) for each in names]


def at_night(*case: Any) -> Any:
    """A parameter, or several, for `make test-all` only."""
    return pytest.param(*case, marks=pytest.mark.nightly)


def is_nightly(path: Path, markers: set[str]) -> bool:
    """Whether a test in this file, with these markers, is left to `make test-all` because of its folder."""
    return bool(PROCESSES & markers) and ALWAYS not in markers and _place_in(NIGHTLY, path) < len(NIGHTLY)


@cache
def _place_in(names: tuple[str, ...], path: Path) -> int:
    """The number of the first of these files and folders in which it is; their count, if it is in none."""
    return next((i for i, name in enumerate(names) if path.is_relative_to(ROOT / "tests" / name)), len(names))


def beyond_a_cover(cases: Sequence[Sequence[str]]) -> list[int]:
    """The places of those cases of one test without which each value of each parameter is still in a case.

    A case is the names of its values, in the order of its parameters. Greedy, and the same in every run: next is the
    case with the most values that none before it has. Three values of one parameter and two of another take three cases
    of six; what one list of tuples gives is one parameter, and stays whole.
    """
    values = [set(enumerate(case)) for case in cases]
    left = random.Random(0).sample(range(len(cases)), len(cases))
    missing = set().union(*values)
    while missing:
        best = max(left, key=lambda place: len(values[place] & missing))
        left.remove(best)
        missing -= values[best]
    return sorted(left)


def spread(files: Iterable[Path]) -> dict[Path, float]:
    """The places of files where several run at once: the long ones evenly among the first four fifths of the others.

    Side by side they would only make each other slower, and the last of them would run beside nothing. The others are
    mixed, the same way each time: neighbours wait for the same things.
    """
    all_files = list(files)
    long = sorted((file for file in all_files if _place_in(LONG, file) < len(LONG)), key=lambda f: _place_in(LONG, f))
    others = [file for file in all_files if file not in set(long)]
    random.Random(0).shuffle(others)
    between = 0.8 * len(others) / max(len(long), 1)
    return {file: i * between - 0.5 for i, file in enumerate(long)} | {file: i for i, file in enumerate(others)}
