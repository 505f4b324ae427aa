"""What a real run records, and what its readers make of it: one run for all tests of this file."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.local_run import Run

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 4

EVALUATION = """
[evaluation]
every = 2
[[evaluation.sets]]
name = "words"
source = "{source}"
max_prompts = 2
"""


@pytest.fixture(scope="module")
def finished(new_run: Callable[..., Run]) -> Run:
    """Two instances, a reference, two steps per batch with an old model, and rewards that are equal in some groups."""
    run = new_run("metrics")
    with run.config.open("a") as config:
        config.write(EVALUATION.format(source=run.config.with_name("rows.jsonl")))
    return run.train(
        *("--train.iterations", str(NUM_ITERATIONS), "--inference.num_instances", "2", "--algorithm.kl_coef", "0.05"),
        *("--train.steps_per_batch", "2", "--algorithm.old_policy", "model"),
        *("--reward.name", f"python:{run.reward}:uneven", "--reward.correct_at", "0.3"),
        *("--trainer.micro_batch_tokens", "200"),
    )


def records_of(run: Run) -> list[dict[str, Any]]:
    return [dict(record) for record in run.lines("metrics.jsonl")]


def names_in(heading: str) -> set[str]:
    """The names in the table below a heading of the page."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.M))


def test_the_page_has_what_records_have_and_records_have_what_the_page_says(finished: Run) -> None:
    always, sometimes = names_in("In every record"), names_in("Where they apply")
    assert len(always) > 50 and not always & sometimes
    patterns = [re.escape(name).replace("LABEL", ".+").replace("PART", ".+").replace("K", r"\d+") for name in sometimes]
    for record in records_of(finished):
        assert always <= record.keys(), always - record.keys()
        others = record.keys() - always
        assert {name for name in others if not any(re.fullmatch(p, name) for p in patterns)} == set()
        assert {"accuracy", "pass@2", "pass@4", "kl", "clip_fraction"} == others


def test_figures_of_a_record_follow_from_its_others_as_the_page_defines_them(finished: Run) -> None:
    for record in records_of(finished):
        tokens = record["prompt_tokens"] + record["response_tokens"]
        devices = record["num_training_devices"] + record["num_inference_devices"]
        assert (record["num_training_devices"], record["num_inference_devices"]) == (1, 2)
        assert record["tpspd"] == pytest.approx(tokens / record["seconds"] / devices)
        steps = [end - start for name, start, end in record["spans"] if name == "step"]
        assert len(steps) == 2 and sum(steps) == pytest.approx(record["step_s"], abs=1e-4)
        bound_s = record["publish_s"] + max(record["rollout_s"] + steps[-1], record["train_s"] + record["step_s"])
        assert record["overlap_bound_s"] == pytest.approx(bound_s, abs=1e-4)
        assert record["overlap_efficiency"] == pytest.approx(
            bound_s / (record["seconds"] - record["evaluation_s"]), abs=1e-4
        )
        assert 0 < record["overlap_efficiency"] <= 1.0 + 1e-6
        assert sum(count for _, _, count in record["response_tokens_histogram"]) == 24
        assert record["model_flops"] > 0 and record["mfu"] is None and record["device_memory_peak_bytes"] is None
        assert record["memory_peak_bytes"] > 50 * 2**20, "a process with torch"


def test_records_agree_with_the_groups_in_the_timeline(finished: Run) -> None:
    for record in records_of(finished):
        rows: list[dict[str, Any]] = [
            dict(row) for row in finished.lines("timeline.jsonl") if row["iteration"] == record["iteration"]
        ]
        assert sum(row["num_response_tokens"] for row in rows) == record["response_tokens"]
        assert sum(row["num_truncated"] for row in rows) / 24 == pytest.approx(record["truncated_share"])
        assert max(row["finished_s"] for row in rows) - min(row["started_s"] for row in rows) == pytest.approx(
            record["rollout_s"], abs=1e-4
        )
        assert record["num_groups_without_signal"] >= sum(int(row["prompt_id"]) % 3 == 0 for row in rows)


def test_iterations_follow_each_other_in_time(finished: Run) -> None:
    for before, after in pairwise(records_of(finished)):
        assert before["started_unix_s"] + before["seconds"] <= after["started_unix_s"] + 0.1


def test_spans_follow_one_another_and_add_up_to_their_figures(finished: Run) -> None:
    for record in records_of(finished):
        spans = sorted(record["spans"], key=lambda span: span[1])
        # Six digits each.
        assert all(ended <= started + 2e-6 for (_, _, ended), (_, started, _) in pairwise(spans))
        for name in ("publish", "period", "step"):
            total_s = sum(ended - started for each, started, ended in spans if each == name)
            assert total_s == pytest.approx(
                record["train_s"] + record["wait_s"] if name == "period" else record[f"{name}_s"], abs=1e-4
            )
