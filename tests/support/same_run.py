"""Whether two runs trained the same, bit for bit; with the settings under which they must be equal."""

from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.local_run import Run

ITERATIONS = 20
SETTINGS = (
    *("--train.iterations", str(ITERATIONS), "--train.order", "prompt", "--checkpoint.every", "1"),
    *("--optimizer.warmup_iterations", "3", "--algorithm.kl_coef", "0.05"),
)
EXACT = ("iteration", "loss", "grad_norm", "learning_rate", "kl", "reward_mean", "response_tokens", "prompt_tokens")
OF_GROUPS = {
    "timeline.jsonl": ("iteration", "index", "prompt_id", "num_response_tokens", "samples", "reward_mean"),
    "samples.jsonl": ("iteration", "index", "prompt_id", "prompt", "responses"),
}


def assert_same_run(run: Run, expected: Run, num_unsampled: int = 0) -> None:
    """Of so many iterations samples are missing: their producer was lost before it had written them."""
    records, expected_records = run.lines("metrics.jsonl"), expected.lines("metrics.jsonl")
    assert [{key: record[key] for key in EXACT} for record in records] == [
        {key: record[key] for key in EXACT} for record in expected_records
    ]
    proofs, expected_proofs = run.lines("ledger.jsonl"), expected.lines("ledger.jsonl")
    for key in ("iteration", "prompt_ids", "prompt_ids_sha256", "samples", "fingerprint", "num_response_tokens"):
        assert [proof[key] for proof in proofs] == [proof[key] for proof in expected_proofs], key
    for name, keys in OF_GROUPS.items():
        rows, expected_rows = ([_trained(row) for row in r.lines(name)] for r in (run, expected))
        there = {row["iteration"] for row in rows}
        num_missing = len({row["iteration"] for row in expected_rows} - there)
        assert num_missing == (num_unsampled if name == "samples.jsonl" else 0)
        expected_rows = [row for row in expected_rows if row["iteration"] in there]
        assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in expected_rows]
    weights, expected_weights = (load_file(r.dir / "model" / "model.safetensors") for r in (run, expected))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())


def _trained(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the instance's log-probs, whose last digits depend on what else was in its batch."""
    responses = row.get("responses", ())
    return row | {"responses": [{**each, "rollout_logprobs": None} for each in responses]}
