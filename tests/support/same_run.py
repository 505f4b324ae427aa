"""Whether two runs trained the same, bit for bit; with the settings under which they must be equal."""

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file

from tests.support.local_run import Run

ITERATIONS = 20
SETTINGS = (
    *("--train.iterations", str(ITERATIONS), "--train.order", "prompt", "--checkpoint.every", "1"),
    *("--optimizer.warmup_iterations", "3", "--algorithm.kl_coef", "0.05"),
)
Row: TypeAlias = dict[str, Any]

KEYS = {
    "samples.jsonl": ("iteration", "index", "prompt_id", "prompt", "responses"),
    "timeline.jsonl": ("iteration", "index", "prompt_id", "num_response_tokens", "samples", "reward_mean"),
    "ledger.jsonl": ("iteration", "prompt_ids", "prompt_ids_sha256", "samples", "fingerprint", "num_response_tokens"),
    "metrics.jsonl": (
        *("iteration", "loss", "grad_norm", "learning_rate", "kl"),
        *("reward_mean", "response_tokens", "prompt_tokens"),
    ),
}
"""What is the same; causes before their effects."""


def assert_same_run(run: Run, expected: Run, num_unsampled: int = 0, but: Collection[str] = ()) -> None:
    """Of so many iterations samples are missing: their producer was lost before it had written them; the keys `but` are
    not compared."""
    for name, keys in KEYS.items():
        rows, expected_rows = ([_trained(row) for row in r.lines(name)] for r in (run, expected))
        there = {row["iteration"] for row in rows}
        num_missing = len({row["iteration"] for row in expected_rows} - there)
        assert num_missing == (num_unsampled if name == "samples.jsonl" else 0), name
        expected_rows = [row for row in expected_rows if row["iteration"] in there]
        _assert_same(name, [key for key in keys if key not in but], rows, expected_rows)
    weights, expected_weights = (load_file(r.dir / "model" / "model.safetensors") for r in (run, expected))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights.items())


def _assert_same(name: str, keys: Sequence[str], rows: Sequence[Row], expected_rows: Sequence[Row]) -> None:
    """Says what differs first: what comes after it follows from it."""
    for row, expected in zip(rows, expected_rows, strict=True):
        differences = [f"{key}: {row[key]!r}, not {expected[key]!r}" for key in keys if row[key] != expected[key]]
        place = {key: expected[key] for key in ("iteration", "index") if key in expected}
        assert not differences, "\n".join([f"{name} at {place}", *differences])


def _trained(row: Row) -> Row:
    """A row without the instance's log-probs, whose last digits depend on what else was in its batch."""
    responses = row.get("responses", ())
    return row | {"responses": [{**each, "rollout_logprobs": None} for each in responses]}
