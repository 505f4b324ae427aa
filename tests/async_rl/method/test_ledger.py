import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_rl.errors import Fenced, OnPolicyViolation
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits, noise_scale
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.types import Batch, Prompt, Publication
from trainer.logprob_gaps import sums_of

LIMITS = NoiseLimits(noise_scale("float32"))
NAN, INF = float("nan"), float("inf")
PUBLICATION = Publication(version="run-7", fingerprint="abc", instances=("http://a",), num_bytes=1, seconds=0.1)
BATCH = Batch(7, {i: Prompt(f"row-{i}", (1, 2), {}) for i in range(3)})


def gaps_of(gaps: list[float], instance: str = "http://a") -> tuple[tuple[str, LogprobGaps], ...]:
    return ((instance, sums_of(torch.tensor(gaps, dtype=torch.float64), LIMITS.clip)),)


def row(index: int) -> GroupProof:
    return GroupProof(
        index=index,
        prompt_id=f"row-{index}",
        num_responses=2,
        num_prompt_tokens=2,
        num_response_tokens=5,
        versions=("run-7",),
        rewards=(0.0, 1.0),
        attempts=1,
        gaps=gaps_of(5 * [1e-6]),
    )


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl", responses_per_prompt=2, limits=LIMITS)


def test_an_exact_batch_of_one_version_is_proven_and_recorded(ledger: Ledger, tmp_path: Path) -> None:
    ledger.require_on_policy(BATCH, PUBLICATION, [row(2), row(0), row(1)])
    record = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert record["on_policy"] is True
    assert record["prompt_ids"] == ["row-0", "row-1", "row-2"]
    assert record["versions"] == ["run-7"]
    assert record["fingerprint"] == "abc"
    assert record["num_responses"] == 6
    assert record["max_logprob_gap"] == 1e-6
    figures = record["logprob_gaps"]
    assert (figures["tokens"], figures["mean"], figures["rms"]) == (15, pytest.approx(1e-6), pytest.approx(1e-6))
    assert figures["k1"] == pytest.approx(-1e-6)
    assert set(figures["instances"]) == {"http://a"}
    assert "15 response tokens are too few to judge" in figures["unjudged"]
    assert figures["largest_rms"] is None


def test_branches_count_with_their_rollout(ledger: Ledger, tmp_path: Path) -> None:
    branched = replace(row(2), num_responses=5, num_turns=7, num_branches=3, num_truncated=1, num_corrected=6)
    ledger.require_on_policy(BATCH, PUBLICATION, [row(0), row(1), branched])
    record = json.loads((tmp_path / "ledger.jsonl").read_text())
    counts = ("num_responses", "num_turns", "num_branches", "num_truncated", "num_corrected")
    assert [record[name] for name in counts] == [9, 7, 3, 1, 6]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0), row(1)], r"group 2 \(prompt 'row-2'\) was trained 0 times"),
        ([row(0), row(1), row(2), row(2)], "group 2 .* was trained 2 times"),
        ([row(0), row(1), row(2), row(3)], "group 3 .* is not part of the batch of 3 prompts"),
        ([row(0), row(1), replace(row(2), prompt_id="other")], "stands in for prompt 'row-2'"),
        ([row(0), row(1), replace(row(2), num_responses=1)], "has 1 responses, expected 2"),
        ([row(0), row(1), replace(row(2), rewards=(1.0,))], "has 2 responses, but 1 rewards"),
        (
            [row(0), row(1), replace(row(2), num_branches=1)],
            r"has 1 rollouts \(2 responses, 1 of them branches\), expected 2",
        ),
        (
            [row(0), row(1), replace(row(2), versions=("run-6",))],
            r"weight versions \['run-6'\], but 'run-7' is training",
        ),
        ([row(0), row(1), replace(row(2), versions=("run-6", "run-7"))], "'run-6', 'run-7'"),
        ([row(0), row(1), replace(row(2), versions=())], r"weight versions \[\]"),
        (
            [row(0), row(1), replace(row(2), gaps=gaps_of([0, 0, 0, 0, NAN]))],
            r"group 2 .*: 1 log-probs are no finite number, .* of instance http://a",
        ),
        ([row(0), row(1), replace(row(2), gaps=gaps_of([0, 0, 0, -INF, INF]))], "2 log-probs are no finite number"),
        ([row(0), row(1), replace(row(2), gaps=gaps_of([0] * 4))], "5 response tokens, but log-probs of 4 were"),
        ([row(0), row(1), replace(row(2), gaps=())], "5 response tokens, but log-probs of 0 were"),
        (
            [row(0), row(1), replace(row(2), num_response_tokens=300, gaps=gaps_of(300 * [0.01], "http://b"))],
            "instance http://b: .* log-probs of 300 tokens, each cut at 0.00195 nats, have RMS 0.00195, noise",
        ),
    ],
)
def test_whatever_breaks_the_proof_is_named_and_recorded(
    ledger: Ledger, tmp_path: Path, rows: list[GroupProof], message: str
) -> None:
    with pytest.raises(OnPolicyViolation, match=message):
        ledger.require_on_policy(BATCH, PUBLICATION, rows)
    record = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert record["on_policy"] is False
    assert record["violations"]


def test_many_violations_are_cut_in_the_message_and_in_the_file_which_counts_them(
    ledger: Ledger, tmp_path: Path
) -> None:
    batch = Batch(7, {i: Prompt(f"row-{i}", (1,), {}) for i in range(200)})
    with pytest.raises(OnPolicyViolation, match="and 192 more"):
        ledger.require_on_policy(batch, PUBLICATION, [])
    record = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert (len(record["violations"]), record["num_violations"]) == (100, 200)


def test_many_versions_are_cut_but_never_hidden(ledger: Ledger, tmp_path: Path) -> None:
    rows = [row(0), row(1), replace(row(2), versions=tuple(f"old-{i:03}" for i in range(100)))]
    with pytest.raises(OnPolicyViolation, match="old-099"):
        ledger.require_on_policy(BATCH, PUBLICATION, rows)
    record = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert len(record["versions"]) == 16 and record["num_violations"] == 1


def test_nothing_is_written_once_another_trainer_writes_the_file(tmp_path: Path) -> None:
    """A trainer may be stopped anywhere, also while it makes the line: it looks at its lease right before the write."""

    def fenced() -> None:
        raise Fenced("term 1 has ended")

    ledger = Ledger(tmp_path / "ledger.jsonl", 2, LIMITS, fenced)
    with pytest.raises(Fenced):
        ledger.require_on_policy(BATCH, PUBLICATION, [row(2), row(0), row(1)])
    assert list(tmp_path.iterdir()) == []


def test_draws_of_an_iteration_that_is_repeated_count_once(ledger: Ledger, tmp_path: Path) -> None:
    def drawn(index: int) -> GroupProof:
        ((instance, gaps),) = gaps_of(5 * [1e-6])
        return replace(row(index), gaps=((instance, replace(gaps, num_drawn=5, hotter_sum=2.0, colder_sum=-1.0)),))

    def prove(iteration: int) -> None:
        ledger.require_on_policy(replace(BATCH, iteration=iteration), PUBLICATION, [drawn(i) for i in range(3)])

    for iteration in (7, 7, 8, 8, 8, 9):
        prove(iteration)
    records = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert [record["draws"]["log_ratio"] for record in records] == [6.0, 6.0, 12.0, 12.0, 12.0, 18.0]
