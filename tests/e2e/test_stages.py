"""Runs whose stages, or ranks of experts, send their own weights train what others do, whatever they lose meanwhile."""

from collections.abc import Callable

import pytest

from tests.support.local_run import Run
from tests.support.same_run import SETTINGS, assert_same_run
from tests.support.tiers import at_night

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

BOTH = (*SETTINGS, "--inference.num_instances=2", "--trainer.micro_batch_tokens=100")
STAGES = ("--trainer.pipeline_parallel=2",)
EXPERTS = ("--trainer.num_processes=2", "--trainer.expert_parallel=2")


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3", STAGES), at_night("qwen3_moe", STAGES), ("qwen3_moe", EXPERTS)],
    ids=["stages", "stages with experts", "ranks of experts"],
)
def test_a_run_whose_stages_send_and_that_loses_both_ends_trains_the_same_bits(
    new_run: Callable[..., Run], family: str, layout: tuple[str, ...], reproducible_products: None
) -> None:
    whole = new_run("whole", family).train(*BOTH, *layout)
    run = new_run("stages", family)
    run.start(*BOTH, *layout, "--publish.transport=stages")
    run.wait_for_iterations(2)
    run.instances()[0].kill()
    run.wait_for_iterations(4)
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    assert_same_run(run, whole, but=("fingerprint",))
    # The fingerprint is over that of each stage.
    assert run.lines("ledger.jsonl")[0]["fingerprint"] != whole.lines("ledger.jsonl")[0]["fingerprint"]
    for each in (run, whole):
        assert len({record["publish_bytes"] for record in each.lines("metrics.jsonl")}) == 1
