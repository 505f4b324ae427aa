"""Runs that publish what has changed train what others do, whatever they lose meanwhile."""

from collections.abc import Callable

import pytest

from tests.support.local_run import Run
from tests.support.same_run import SETTINGS, assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(900)]

ITERATIONS = 10
# So small a step changes few of the weights.
BOTH = (
    *(*SETTINGS, f"--train.iterations={ITERATIONS}", "--train.exact=true", "--optimizer.learning_rate=1e-11"),
    "--inference.num_instances=2",
)


def test_a_run_that_sends_changes_and_loses_both_ends_trains_the_same_bits(
    new_run: Callable[..., Run], reproducible_products: None
) -> None:
    whole = new_run("whole").train(*BOTH)
    run = new_run("changes")
    run.start(*BOTH, "--publish.transport=changes")
    run.wait_for_iterations(3)
    run.instances()[0].kill()
    run.wait_for_iterations(5)
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    assert_same_run(run, whole)
    all_bytes = {record["publish_bytes"] for record in whole.lines("metrics.jsonl")}
    assert len(all_bytes) == 1
    shares = [record["publish_bytes"] / max(all_bytes) for record in run.lines("metrics.jsonl")]
    # Either way takes milliseconds here, so on a busy machine all may be sent at times.
    assert shares[0] == 1 and sum(share < 0.3 for share in shares) >= 2, shares
