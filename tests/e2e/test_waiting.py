"""What a trainer does that has nothing to do: hardly anything."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.local_run import Run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="counts switches in /proc"),
]

MEASURED_S = 5.0

MOST = 500
"""A second, all threads together. One of gloo's wakes every 10 ms, for the ranks' groups; about 230 were measured with
another one for the weights, and 2,130 when each of Megatron's groups had such a thread."""


def num_switches(pid: int) -> int:
    """How often a thread of the process went to sleep because it waited."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        found += int(fields["voluntary_ctxt_switches"])
    return found


def test_a_trainer_that_waits_for_rewards_sleeps(new_run: Callable[..., Run]) -> None:
    run = new_run("waiting")
    run.start("--train.iterations", "1000")
    run.wait_for_iterations(1)
    run.hold()
    # What was under way ends.
    time.sleep(2.0)
    (rank,) = run.ranks()
    before = num_switches(rank.pid)
    time.sleep(MEASURED_S)
    assert (num_switches(rank.pid) - before) / MEASURED_S < MOST
    run.tell("")
