import json
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from async_rl.config.sections import TrackingSection
from async_rl.errors import Fenced
from async_rl.evaluation.recorder import EvaluationRecorder, SetResult, SourceResult
from async_rl.records.records import cut_run_records
from async_rl.records.run_records import EVALUATIONS
from async_rl.records.trackers.choice import open_trackers


def result(iteration: int, num_prompts: int = 3, **figures: float) -> SetResult:
    return SetResult(iteration, f"v{iteration}", "math", num_prompts, 3, 0, 2, 1.0, 0.5, figures, 1e9)


def test_a_result_goes_to_its_file_to_tensorboard_and_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = open_trackers(TrackingSection(), tmp_path, 0, {})
    recorder = EvaluationRecorder(tmp_path, trackers=trackers)
    with caplog.at_level(logging.INFO):
        recorder.write([result(4, **{"pass@1": 0.25, "reward_mean": 0.5})])
    trackers.close()
    (line,) = (tmp_path / EVALUATIONS).read_text().splitlines()
    record = json.loads(line)
    assert (record["iteration"], record["weight_version"], record["set"]) == (4, "v4", "math")
    assert (record["num_prompts"], record["total_prompts"], record["pass@1"]) == (3, 3, 0.25)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "evaluation")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/math/pass@1")] == [(4, 0.25)]
    assert "iteration 4, math: pass@1 0.250, reward_mean 0.500, 3 of 3 prompts" in caplog.text


def test_a_resumed_run_evaluates_later_iterations_again(tmp_path: Path) -> None:
    for first, iterations in ((0, (0, 2, 4)), (3, (4,))):
        time.sleep(1.0)  # Event files are read in the order of their names, which have the second in front.
        cut_run_records(tmp_path, first)
        trackers = open_trackers(TrackingSection(), tmp_path, first, {})
        recorder = EvaluationRecorder(tmp_path, trackers=trackers)
        for iteration in iterations:
            recorder.write([result(iteration, **{"pass@1": first / 10})])
        trackers.close()
    lines = [json.loads(line) for line in (tmp_path / EVALUATIONS).read_text().splitlines()]
    assert [(line["iteration"], line["pass@1"]) for line in lines] == [(0, 0.0), (2, 0.0), (4, 0.3)]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "evaluation")).Reload()
    values = [(event.step, round(event.value, 3)) for event in events.Scalars("eval/math/pass@1")]
    assert values == [(0, 0.0), (2, 0.0), (4, 0.3)]


def test_a_set_of_which_nothing_was_done_is_recorded_without_figures(tmp_path: Path) -> None:
    recorder = EvaluationRecorder(tmp_path)
    recorder.write([result(0, num_prompts=0)])
    record = json.loads((tmp_path / EVALUATIONS).read_text())
    assert record["num_prompts"] == 0 and "reward_mean" not in record


def test_nothing_is_written_once_another_trainer_writes_the_file(tmp_path: Path) -> None:
    def fenced() -> None:
        raise Fenced("term 1 has ended")

    recorder = EvaluationRecorder(tmp_path, require_lease=fenced)
    with pytest.raises(Fenced):
        recorder.write([result(4)])
    assert not (tmp_path / EVALUATIONS).exists()


def test_intervals_and_sources_are_objects_of_the_line_and_no_figures_of_tensorboard(tmp_path: Path) -> None:
    source = SourceResult(1, {"avg@2": 0.5}, {"avg@2": (0.0, 1.0)})
    both = replace(
        result(4, **{"avg@2": 0.25}), top_p=0.95, top_k=20, intervals={"avg@2": (0.1, 0.5)}, sources={"gsm8k": source}
    )
    trackers = open_trackers(TrackingSection(), tmp_path, 0, {})
    EvaluationRecorder(tmp_path, trackers=trackers).write([both])
    trackers.close()
    record = json.loads((tmp_path / EVALUATIONS).read_text())
    assert (record["top_p"], record["top_k"], record["intervals"]) == (0.95, 20, {"avg@2": [0.1, 0.5]})
    assert record["sources"] == {"gsm8k": {"num_prompts": 1, "avg@2": 0.5, "intervals": {"avg@2": [0.0, 1.0]}}}
    events = EventAccumulator(str(tmp_path / "tensorboard" / "evaluation")).Reload()
    assert events.Tags()["scalars"] == ["eval/math/avg@2"]
