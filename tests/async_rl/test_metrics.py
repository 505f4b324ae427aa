import json
import logging
import time
from pathlib import Path
from typing import Any

from async_rl.metrics import Recorder
from async_rl.types import Group, GroupProof, Prompt, Publication, Response, StepStats, WeightSpan

VERSION = "run-0"


def group(index: int, finished_s: float, num_continued: int = 0, num_resampled: int = 0) -> Group:
    response = Response(
        (5, 6), (-0.1, -0.2), "5 6", "stop", (WeightSpan(VERSION, 0, 2),), "http://a", num_continued, num_resampled
    )
    started_s = time.monotonic()
    prompt = Prompt(f"row-{index}", (1, 2), {})
    return Group(0, index, prompt, (response,), (1.0,), VERSION, started_s, started_s + finished_s)


def run_iteration(recorder: Recorder, iteration: int, groups: list[Group], train_s: float, num_instances: int) -> None:
    record = recorder.begin(iteration)
    with record.timed("period_s"):
        for each in groups:
            with record.training([[each]]):
                time.sleep(train_s)
    record.add_step([GroupProof.of(each, 0.0) for each in groups], StepStats(0.0, 0.0, 0.0))
    instances = tuple(f"http://{i}" for i in range(num_instances))
    recorder.end(record, Publication(VERSION, "", instances, 0, 0.0))


def test_a_record_tells_idle_shares_and_interrupted_responses(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, iterations=1)
    groups = [group(0, 0.01, num_continued=2), group(1, 0.02, num_continued=1, num_resampled=1)]
    run_iteration(recorder, 0, groups, train_s=0.05, num_instances=1)
    recorder.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["num_continued"] == 3 and record["num_resampled"] == 1
    assert record["idle_training"] < 0.5 and 0.5 < record["idle_inference"] < 1.0
    assert record["desired_instances"] == 1


def test_desired_instances_follow_from_rollouts_that_outlast_training(tmp_path: Path, caplog: Any) -> None:
    recorder = Recorder(tmp_path, iterations=2)
    groups = [group(index, 100.0) for index in range(6)]
    with caplog.at_level(logging.INFO):
        run_iteration(recorder, 0, groups, train_s=0.01, num_instances=2)
        recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["desired_instances"] == 6, "at most one per group"
    assert "6 instances would balance the pools, 2 took part" in caplog.text


def test_every_record_is_handed_on(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    recorder = Recorder(tmp_path, 2, on_record=lambda record: seen.append(dict(record)))
    for iteration in range(2):
        run_iteration(recorder, iteration, [group(0, 0.01)], train_s=0.0, num_instances=1)
    recorder.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in seen] == [0, 1]
    assert [record["desired_instances"] for record in seen] == [record["desired_instances"] for record in written]


def test_a_rank_that_writes_no_records_hands_none_on() -> None:
    seen: list[Any] = []
    recorder = Recorder(None, 1, on_record=seen.append)
    run_iteration(recorder, 0, [group(0, 0.01)], train_s=0.0, num_instances=1)
    recorder.close()
    assert seen == []
