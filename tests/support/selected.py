"""What a run with a reserve of prompts selected: every third prompt has equal rewards, and is left out if possible."""

from typing import Any

from tests.support.local_run import Run


def selections(run: Run) -> list[Any]:
    return [proof["selection"] for proof in run.lines("ledger.jsonl")]


def require_selected(run: Run) -> None:
    """Every third prompt was drawn and left out, and as many were trained as without a reserve."""
    records, proofs = run.lines("metrics.jsonl"), run.lines("ledger.jsonl")
    assert all(proof["on_policy"] and proof["num_groups"] == 6 for proof in proofs)
    left_out = [record["num_left_out"] for record in records]
    assert sum(left_out) > len(records), left_out
    assert [proof["selection"]["num_left_out"] for proof in proofs] == left_out
    for record in records:  # The others' rewards are 0.
        assert (record["reward_mean_drawn"] < record["reward_mean"]) == (record["num_left_out"] != 0)
    rows = run.lines("timeline.jsonl")
    trained = [int(row["prompt_id"]) for row in rows if row.get("is_trained", True)]
    not_trained = [row for row in rows if not row.get("is_trained", True)]
    assert len(not_trained) == sum(left_out) and all(int(row["prompt_id"]) % 3 == 0 for row in not_trained)
    assert all(
        row["reward_mean"] == 0.0 and row["num_response_tokens"] and not row["logprob_gaps"] for row in not_trained
    )
    num_without_signal = sum(selection["num_without_signal"] for selection in selections(run))
    assert sum(number % 3 == 0 for number in trained) == num_without_signal
