"""The benchmark of several senders runs, and each sends through its own link."""

import json
import subprocess
import sys

import pytest

from benchmarks.common.hosts import why_not
from benchmarks.common.link import why_no_link

pytestmark = pytest.mark.distributed


def test_two_senders_are_faster_where_their_links_are_slow() -> None:
    if (reason := why_not() or why_no_link()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmarks.stages", "--json", "--size", "tiny", "--repeats", "1"]
    command += ["--mbit-per-s", "0.5", "--delay-ms", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["speedup"] > 1.3 and 0.5 < result["one_of_the_rate"] < 1, result
