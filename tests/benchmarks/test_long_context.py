"""The benchmark of long responses runs: ranks that share rows keep their share, and send what the formula says; two
replicas need about half as long for pieces of a group as one for the whole."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed


def test_two_ranks_keep_half_of_the_activations_and_send_what_the_formula_says() -> None:
    command = [sys.executable, "-m", "benchmarks.long_context", "--json", "--tokens", "4096", "--ranks", "1,2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    alone, by_rows, by_tensors = json.loads(done.stdout.splitlines()[-1])
    assert alone["sent_bytes_per_layer"] == 0
    for each in (by_rows, by_tensors):
        assert each["sent_bytes_per_layer"] == each["formula_bytes"] > 0
    # What came from the other rank is kept beside the queries and keys that norms have read.
    assert 0.5 * alone["peak_bytes"] < by_rows["peak_bytes"] < 0.6 * alone["peak_bytes"]


def test_two_replicas_train_pieces_of_a_group_in_less_time_than_one_the_whole() -> None:
    command = [sys.executable, "-m", "benchmarks.long_context", "--json", "--tokens", "8192", "--pieces"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 8192 and found["cpu_s"]["pieces"] < 0.8 * found["cpu_s"]["whole"]
