"""The benchmark of adapters runs, and shows what is sent."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def test_a_publish_of_adapters_sends_their_factors_alone() -> None:
    command = [sys.executable, "-m", "benchmarks.adapters", "--json", "--size", "31M", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    # Per layer of 8: q 512 x 512, k and v 128 x 512, o 512 x 512, gate, up and down 512 x 1408; in float32.
    sums = (512 + 512) + 2 * (128 + 512) + (512 + 512) + 3 * (512 + 1408)
    assert result["adapter_mb"] == pytest.approx(8 * 16 * sums * 4 / 1e6, abs=0.1)
    assert result["share"] == pytest.approx(result["adapter_mb"] / result["whole_mb"], abs=1e-3)
    assert result["peak_mb_adapters"] < result["peak_mb_full"]
    assert result["adapters_s"] < result["whole_s"]
    # No product of a frozen weight's gradient, a third of a step's: two thirds, and those of the factors.
    assert 0.6 < result["gflop_adapters"] / result["gflop_full"] < 0.8
