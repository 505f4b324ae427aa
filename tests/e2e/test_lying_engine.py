"""An engine that draws otherwise than it reports, in a run: no log-prob shows it."""

from collections.abc import Callable

import pytest

from tests.support.broken_instance import broken_python, faults_by_url
from tests.support.local_run import Run

pytestmark = [pytest.mark.distributed, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_an_instance_that_draws_at_another_temperature_than_it_reports_ends_the_run_by_its_name(
    new_run: Callable[..., Run],
) -> None:
    run = new_run("lying")
    broken = run.config.with_name("broken")
    python = broken_python(broken, ["", "quiet temperature"])
    run.start(
        *(f"--inference.python={python}", "--inference.num_instances=2", "--prompts.prompts_per_batch=40"),
        *("--rollout.responses_per_prompt=8", "--rollout.max_response_tokens=48", "--train.iterations=12"),
    )
    assert run.finish() != 0, run.everything_said()
    (liar,) = (url for url, fault in faults_by_url(broken).items() if fault)
    said = run.everything_said()
    assert f"{liar}: its last " in said and "likelier at a lower temperature" in said, said
    assert "drawn from another distribution than the one reported" in run.output.read_text()
    (honest,) = (url for url, fault in faults_by_url(broken).items() if not fault)
    assert f"{honest}: its last" not in said
    records = run.lines("metrics.jsonl")
    assert len(records) < 12 and all(record["max_logprob_gap"] < 1e-4 for record in records)
