"""What a run writes at 8,192 prompts with 64 responses each: little per iteration, and groups in bounded files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_rl.method.ledger import Ledger
from async_rl.method.proof.gap_limits import NoiseLimits, noise_scale
from async_rl.method.proof.prompt_ids import digest_of_ids
from async_rl.method.step_stats import StepStats
from async_rl.method.types import digest_of
from async_rl.records.recorder import RunRecorder
from async_rl.records.rotation import SAMPLES, TIMELINE
from async_rl.records.samples import MAX_CHARACTERS, NUM_GROUPS, NUM_ROLLOUTS
from tests.support.large_batch import INSTANCES, make_batch, make_groups, make_row, publication_of
from tests.support.rotated_rows import rotated_rows

NUM_PROMPTS, NUM_RESPONSES_EACH = 8192, 64


def decode(token_ids: Sequence[int]) -> str:
    return "prompt " * 10_000


def run_iteration(run_dir: Path, num_prompts: int, num_responses: int) -> list[str]:
    """Records one iteration as `async_rl.loop` does; answers with the prompt ids in the order of places."""
    publication = publication_of("0123abcd-0")
    recorder = RunRecorder(run_dir, iterations=1, correct_at=1.0, decode=decode)
    ledger = Ledger(run_dir / "ledger.jsonl", num_responses, NoiseLimits(noise_scale("bfloat16")))
    batch = make_batch(0, num_prompts)
    groups, draw = make_groups(batch, publication.version, num_responses), random.Random(0)
    rows = [make_row(group, draw) for group in groups]
    record = recorder.begin_iteration(0)
    with record.timed("period_s"):
        for group in groups:
            with record.training([[group]]):
                pass
    recorder.write_groups(record, rows)
    ledger.require_on_policy(batch, publication, rows)
    record.add_step(rows, StepStats(0.1, 1.0, 1e-6, {"kl": 0.1, "entropy": 0.5}))
    recorder.end_iteration(record, publication)
    recorder.close()
    return [batch.prompts[index].prompt_id for index in range(num_prompts)]


def sizes_of(run_dir: Path) -> dict[str, int]:
    return {name: (run_dir / name).stat().st_size for name in ("metrics.jsonl", "ledger.jsonl")}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    run_dir = tmp_path_factory.mktemp("large")
    return run_dir, run_iteration(run_dir, NUM_PROMPTS, NUM_RESPONSES_EACH)


@pytest.mark.nightly
def test_records_and_proofs_are_as_small_as_those_of_a_small_batch(
    large: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run_dir, _ = large
    run_iteration(tmp_path, len(INSTANCES), 4)
    sizes, small = sizes_of(run_dir), sizes_of(tmp_path)
    assert sizes["metrics.jsonl"] < 4_000
    assert sizes["ledger.jsonl"] < 4_000 + 300 * len(INSTANCES)
    assert all(sizes[name] < 1.2 * small[name] + 100 for name in sizes), f"{sizes}, and of a small batch {small}"


@pytest.mark.computes
def test_samples_are_a_few_groups_by_place_cut_to_a_readable_length(large: tuple[Path, list[str]]) -> None:
    run_dir, prompt_ids = large
    samples = list(rotated_rows(SAMPLES, run_dir))
    assert [row["prompt_id"] for row in samples] == prompt_ids[:NUM_GROUPS]
    assert all(len(row["responses"]) == NUM_ROLLOUTS for row in samples)
    texts = [text for row in samples for text in (row["prompt"], *(each["text"] for each in row["responses"]))]
    assert all(len(text) < MAX_CHARACTERS + 50 for text in texts)
    assert "[... 68000 characters ...]" in samples[0]["prompt"]
    assert samples[0]["responses"][1] == {
        "text": samples[0]["responses"][1]["text"],
        "reward": 1.0,
        "num_tokens": 1500,
        "finish_reason": "stop",
    }


def test_every_group_is_in_the_timeline_and_proves_what_the_ledger_says(large: tuple[Path, list[str]]) -> None:
    run_dir, prompt_ids = large
    proof = json.loads((run_dir / "ledger.jsonl").read_text())
    rows = list(rotated_rows(TIMELINE, run_dir))
    assert [row["prompt_id"] for row in rows] == prompt_ids and proof["prompt_ids"] is None
    assert digest_of_ids(row["prompt_id"] for row in rows) == proof["prompt_ids_sha256"]
    assert digest_of([row["samples"] for row in rows]) == proof["samples"]
    assert sum(row["num_responses"] for row in rows) == proof["num_responses"] == NUM_PROMPTS * NUM_RESPONSES_EACH
    assert sum(row["num_response_tokens"] for row in rows) == proof["num_response_tokens"]
    assert {tuple(row["versions"]) for row in rows} == {tuple(proof["versions"])}
    for instance, figures in proof["logprob_gaps"]["instances"].items():
        own = [row["logprob_gaps"][instance] for row in rows if instance in row["logprob_gaps"]]
        tokens = sum(each["tokens"] for each in own)
        assert tokens == figures["tokens"]
        assert max(each["max"] for each in own) == pytest.approx(figures["max"], rel=1e-5)
        for name in ("mean", "mean_abs", "k3"):
            assert sum(each[name] * each["tokens"] for each in own) / tokens == pytest.approx(figures[name], rel=1e-4)
        squares = sum(each["rms"] ** 2 * each["tokens"] for each in own)
        assert (squares / tokens) ** 0.5 == pytest.approx(figures["rms"], rel=1e-5)


def test_a_thousand_iterations_stay_far_below_a_gigabyte(large: tuple[Path, list[str]]) -> None:
    run_dir, _ = large
    growing = sum(sizes_of(run_dir).values())
    rotated = sum((kind.num_kept + 1) * kind.max_bytes for kind in (TIMELINE, SAMPLES))
    assert 1000 * growing + rotated < 500 * 2**20
    assert (run_dir / "timeline.jsonl").stat().st_size < TIMELINE.max_bytes / 10, "a file has more than ten iterations"
