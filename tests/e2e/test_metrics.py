"""What a real run records, and what its readers make of it: one run for all tests of this file."""

import json
import re
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

import pytest

from deploy.trace import FIRST_INSTANCE_PID, TRAINER_PID, trace_of
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
        *("--reward.name", f"python:{run.reward}:uneven"),
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


def bars_of(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The bars of each row."""
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return rows


def seconds_of(bars: list[dict[str, Any]], name: str, within: dict[str, Any]) -> float:
    """The time of the bars of that name that begin within another one."""
    end = within["ts"] + within["dur"]
    return sum(bar["dur"] for bar in bars if bar["name"] == name and within["ts"] <= bar["ts"] < end) / 1e6


def test_the_trace_of_a_run_is_nested_and_adds_up_to_its_records(finished: Run) -> None:
    trace = json.loads(trace_of(finished.dir, num_periods=3))
    rows = bars_of(trace)
    for bars in rows.values():
        for bar, other in permutations(bars, 2):
            is_before = bar["ts"] + bar["dur"] <= other["ts"] + 2
            is_after = other["ts"] + other["dur"] <= bar["ts"] + 2
            holds = bar["ts"] <= other["ts"] + 2 and other["ts"] + other["dur"] <= bar["ts"] + bar["dur"] + 2
            held = other["ts"] <= bar["ts"] + 2 and bar["ts"] + bar["dur"] <= other["ts"] + other["dur"] + 2
            # Microseconds, to which times are rounded.
            assert is_before or is_after or holds or held, (bar, other)
    trainer = rows[TRAINER_PID, 0]
    records = records_of(finished)[-3:]
    iterations = [bar for bar in trainer if bar["name"].startswith("iteration ")]
    assert [bar["name"] for bar in iterations] == [f"iteration {record['iteration']}" for record in records]
    for bar, record in zip(iterations, records, strict=True):
        assert bar["dur"] / 1e6 == pytest.approx(record["seconds"])
        for name, key in (("publish", "publish_s"), ("step", "step_s"), ("window", "train_s"), ("wait", "wait_s")):
            # Six digits per bar, and fewer than a hundred bars.
            assert seconds_of(trainer, name, bar) == pytest.approx(record[key], abs=1e-4), name
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    instances = {pid for pid in names if pid >= FIRST_INSTANCE_PID}
    groups = [bar for (pid, _), bars in rows.items() if pid in instances for bar in bars]
    assert len(groups) == 3 * 6 and {names[pid].split(":")[0] for pid in instances} == {"http"}
    for bar, record in zip(iterations, records, strict=True):
        own = [group for group in groups if group["args"]["iteration"] == record["iteration"]]
        last = max(group["ts"] + group["dur"] for group in own)
        assert (last - min(group["ts"] for group in own)) / 1e6 == pytest.approx(record["rollout_s"], abs=1e-4)
        assert bar["ts"] <= min(group["ts"] for group in own) and last <= bar["ts"] + bar["dur"]
    assert "evaluation" in names.values()
    counts = [event["args"]["groups"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert min(counts) >= 0 and counts[-1] == 0
