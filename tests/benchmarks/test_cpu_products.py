"""The benchmark of products runs as a program, and reports all of its cases."""

import json
import subprocess
import sys

import pytest

from async_rl.cpu.products import has_onednn
from benchmarks.products import ROWS, WEIGHTS
from tests.support import ROOT

pytestmark = pytest.mark.distributed


def figures_of(*command: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not has_onednn(), reason="needs AVX-512")
def test_products_of_every_size_have_a_ratio() -> None:
    found = figures_of("benchmarks.products", "--json", "--rounds", "1")
    ratios = [name for name in found if name.startswith("ratio.")]
    assert len(ratios) == len(ROWS) * len(WEIGHTS) and all(value > 0 for value in found.values())
