"""The benchmark of the sandbox runs as a user starts it, and reports all its figures."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.distributed


def test_the_benchmark_reports_programs_tool_calls_and_responses_per_second() -> None:
    command = [sys.executable, "-m", "benchmarks.sandbox", "--json", "--num-programs", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rates = ("bare", "programs", "ratio", "tool_calls", "stdio_responses", "assert_responses")
    assert all(found[name] > 0 for name in rates), found
