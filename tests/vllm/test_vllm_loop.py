"""The whole loop with vLLM as the inference pool: on-policy by proof, and by the log-probs themselves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_run import Run

pytestmark = [pytest.mark.vllm, pytest.mark.distributed, pytest.mark.timeout(600)]

FINISH_TIMEOUT_S = 400


@pytest.fixture
def run(tmp_path: Path, vllm_model: Path) -> Iterator[Run]:
    run = Run(tmp_path, vllm_model)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.terminate()
        run.process.wait(30)


def test_a_run_with_vllm_is_on_policy_and_its_log_probs_are_the_trainers(run: Run, vllm_python: str) -> None:
    run.start("--inference.engine", "vllm", "--inference.python", vllm_python)
    assert run.finish(FINISH_TIMEOUT_S) == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1, 2]
    assert all(proof["on_policy"] and proof["num_groups"] == 6 and proof["num_responses"] == 24 for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == 3
    assert len({proof["fingerprint"] for proof in proofs}) == 3, "every step changes the weights"
    assert all(record["max_logprob_gap"] <= 1e-3 for record in run.lines("metrics.jsonl"))
