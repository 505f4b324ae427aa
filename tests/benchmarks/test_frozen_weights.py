"""The placement benchmark runs, and shows what it is for: the host saves the reference's bytes on the device."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed


def test_weights_on_the_host_save_their_bytes_on_the_device() -> None:
    command = [sys.executable, "-m", "benchmarks.frozen_weights", "--json", "--size", "tiny", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    saved = result["peak_bytes_device"] - result["peak_bytes_host"]
    assert saved >= 0.9 * result["reference_bytes"] > 0
