"""The benchmark of modes runs each of them on the same work."""

import json
import subprocess
import sys

import pytest

from benchmarks.modes import MODES, summary
from tests.support import ROOT


@pytest.mark.distributed
def test_every_mode_trains_and_generates_the_case() -> None:
    command = [sys.executable, "-m", "benchmarks.modes", "--cases", "tiny:16:2:1", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    whats = ("train", "generate")
    assert found.keys() == {f"{mode}.{what}.tiny:16:2:1" for mode in MODES for what in whats} | {
        f"ratio.{mode}.{what}.tiny:16:2:1" for mode in MODES[1:] for what in whats
    }
    assert min(found.values()) > 0


def test_ratios_are_of_the_first_mode_to_each_other_one() -> None:
    found = summary("train.x", ["float32", "exact"], [[2.0, 4.0], [3.0, 3.0], [1.0, 4.0]])
    assert found == {"float32.train.x": 2.0, "exact.train.x": 4.0, "ratio.exact.train.x": 0.5}
