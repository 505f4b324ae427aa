"""The producer benchmark runs, at a size of seconds, and accounts for all that it says."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed


def test_the_benchmark_says_what_rollouts_cost() -> None:
    sizes = "--prompts 8 --responses 4 --tokens 64 --small-responses 160 --pairs 1 --window-s 0.2 --warm-up-s 0.2"
    sizes += " --instances 6 --replicas 3 --idle-s 0.2"
    command = [sys.executable, "-m", "benchmarks.producer", "--json", *sizes.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["responses_per_s"] > 0 and result["wall_responses_per_s"] > 0
    assert abs(result["cpu_s_per_1000"] * result["responses_per_s"] - 1000) < 20
    assert result["large_tokens"] > 8 * 4 * 32 and result["large_tokens_per_cpu_s"] > 0
    assert result["peak_bytes"] >= 0
    assert result["wide_cpu_s"] > 0 and result["wide_least"] <= 8 * 4 / 3 <= result["wide_most"]
    assert result["main_thread_slowdown"] > -0.9
