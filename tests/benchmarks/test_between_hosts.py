"""The benchmark of the network runs, and a delay is seen in what it measures."""

import json
import subprocess
import sys

import pytest

from benchmarks.common.hosts import why_not
from benchmarks.common.link import why_no_link

pytestmark = pytest.mark.distributed


def test_a_publish_over_a_link_with_a_delay_takes_round_trips_longer() -> None:
    if (reason := why_not() or why_no_link()) is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmarks.between_hosts", "--json", "--size", "tiny", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    # A publish has at least six calls one after the other.
    assert result["small_publish_s.far"] > result["small_publish_s.near"] + 6 * 0.020
    assert {f"rollout_s.{network}.{length}" for network in ("near", "far") for length in (8, 64)} <= result.keys()
    assert 0 < result["of_the_rate.1"] < 1 and 0 < result["changes_bytes.far"] < 1 / 3
