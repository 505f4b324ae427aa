import json
import math
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from async_rl.parts.dashboard.run_data import (
    NUM_LOG_LINES,
    RunData,
    SampleFilter,
    about_run,
    as_json,
    names_of,
    open_run,
)
from async_rl.records.records import cut_run_records
from async_rl.shared.locks.lease import take_lease
from tests.support.synthetic_run import SyntheticRun


def test_columns_are_the_numbers_of_the_records(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=12)
    run.write()
    metrics = open_run(run.run_dir).records(0, 0, 0)["metrics"]
    assert metrics["iterations"] == list(range(12))
    for iteration in range(12):
        record = run.record(iteration)
        for name in ("reward_mean", "entropy", "seconds", "extra_metric_7"):
            assert metrics["columns"][name][iteration] == record[name]
    assert metrics["columns"]["entropy"][3] is None
    assert "on_policy" not in metrics["columns"] and "iterations" not in metrics["columns"]
    assert metrics["hours"][-1] == pytest.approx(sum(metrics["columns"]["seconds"]) / 3600)


def test_only_what_a_page_lacks_is_sent(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=5)
    run.write(last=3)
    records = RunData(run.run_dir)
    first = records.records(0, 0, 0)
    run.write(first=3)
    state = records.follow()
    assert (state.num_records, state.num_proofs) == (5, 5)
    rest = records.records(first["generation"], 3, 3)
    assert rest["metrics"]["first"] == 3 and rest["metrics"]["iterations"] == [3, 4]
    assert [row["iteration"] for row in rest["proofs"]["rows"]] == [3, 4]


def test_after_a_resume_the_page_gets_all_records_anew(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=6)
    run.write()
    records = RunData(run.run_dir)
    before = records.follow()
    records.period(4)
    cut_run_records(run.run_dir, first_iteration=4)
    again = SyntheticRun(run.run_dir, num_iterations=6, seed=1)
    again.write(first=4, last=5)
    state = records.follow()
    assert state.generation > before.generation and state.num_records == 5
    sent = records.records(before.generation, 6, 6)
    assert sent["metrics"]["first"] == 0 and sent["metrics"]["iterations"] == [0, 1, 2, 3, 4]
    assert sent["metrics"]["columns"]["reward_mean"][4] == again.record(4)["reward_mean"]
    lengths = [group["num_response_tokens"] for group in records.period(4)["groups"]]
    assert lengths == [group["num_response_tokens"] for group in again.groups(4)]
    assert records.period(5)["groups"] == []


def test_a_period_has_its_groups_with_instances_and_those_left_out(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=30, num_groups=6, num_left_out=2)
    run.write()
    records = RunData(run.run_dir)
    records.follow()
    period = records.period(12)
    for name in ("seconds", "publish_s", "merged_share"):
        assert period[name] == run.record(12)[name], name
    assert period["spans"][0] == ["publish", 0.0, 0.5]
    groups = period["groups"]
    assert [group.get("is_trained", True) for group in groups] == [True] * 6 + [False] * 2
    assert [group["instances"] for group in groups[:2]] == [["http://10.0.0.0:8000"], ["http://10.0.0.1:8000"]]
    for group, row in zip(groups, run.groups(12), strict=True):
        assert group["num_response_tokens"] == row["num_response_tokens"]
        assert group.get("finished_s") == row.get("finished_s")


def test_samples_are_chosen_by_iteration_reward_and_text(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=4)
    run.write()
    records = RunData(run.run_dir)
    all_rows = records.samples(SampleFilter(), 0, 50)
    assert all_rows["total"] == 12
    assert [(row["iteration"], row["index"]) for row in all_rows["rows"][:4]] == [(3, 0), (3, 1), (3, 2), (2, 0)]
    assert records.samples(SampleFilter(iteration=2), 0, 50)["total"] == 3
    assert records.samples(SampleFilter(highest=-0.25), 0, 50)["total"] == 4
    assert records.samples(SampleFilter(lowest=2.0), 0, 50)["rows"] == []
    assert records.samples(SampleFilter(text="WHAT IS 1 + 2?"), 0, 50)["total"] == 1
    assert [row["index"] for row in records.samples(SampleFilter(iteration=1), 1, 1)["rows"]] == [1]


BROKEN = [
    "",
    "null",
    "[1]",
    "nonsense",
    '{"iteration": "1"}',
    '{"iteration": true, "reward_mean": 1}',
    '{"iteration": 1, "reward_mean": NaN, "loss": Infinity, "entropy": "0.5", "responses": 3}',
    '{"iteration": 2, "reward_mean": 1e999, "logprob_gaps": [], "violations": 5, "responses": [1, {"reward": "x"}]}',
    '{"iteration": 3, "reward_mean": ' + "9" * 400 + ', "logprob_gaps": {"instances": {"a": 1, "b": {"rms": []}}}}',
    '{"iteration": 4, "reward_mean": {"a": 1}, "violations": ["<script>", 3], "prompt": "\\ud800", "responses": {}}',
    '{"iteration": 5, "spans": [[1], "a", ["x", null]], "response_tokens_histogram": {}}',
    "[" * 100_000,
    '{"iteration": 6',
]


def test_broken_records_are_left_out_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    for name in ("metrics", "ledger", "evaluations", "timeline", "samples"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(BROKEN))
    run = open_run(tmp_path)
    sent = run.records(0, 0, 0)
    assert sent["metrics"]["iterations"] == [1, 2, 3, 4, 5]
    assert sent["metrics"]["columns"].keys() == {"responses", "violations"}
    assert sent["proofs"]["rows"][3]["violations"] == ["<script>", "3"]
    assert sent["proofs"]["rows"][2]["instances"] == {"b": [None, None]}
    answers = [sent, run.periods(), *(run.period(i) for i in range(7)), run.samples(SampleFilter(text="a"), 0, 9)]
    for answer in [*answers, run.samples(SampleFilter(lowest=0.0), 0, 9), run.samples(SampleFilter(), 0, 9)]:
        json.loads(as_json(answer))


def test_rewards_of_samples_are_numbers_or_null_and_responses_are_tables(tmp_path: Path) -> None:
    responses = [None, 1, {"reward": "x", "reward_parts": [1]}, {"reward": 10**400, "reward_parts": {"a": "b", "c": 1}}]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"iteration": 0, "responses": responses}) + "\n")
    (row,) = open_run(tmp_path).samples(SampleFilter(), 0, 9)["rows"]
    assert row["responses"] == [{"reward": None}, {"reward": None, "reward_parts": {"a": None, "c": 1}}]


def test_hours_ascend_and_are_finite_whatever_iterations_took(tmp_path: Path) -> None:
    rows = [{"iteration": i, "seconds": seconds} for i, seconds in enumerate((3600, -7200, None, 1e308, 1e308, 1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hours = open_run(tmp_path).records(0, 0, 0)["metrics"]["hours"]
    assert hours[:3] == [1, 1, 1] and hours == sorted(hours) and all(map(math.isfinite, hours))


def test_runs_of_the_same_name_are_told_apart_by_their_parents(tmp_path: Path) -> None:
    dirs = [tmp_path / name for name in ("a/x", "b/x", "a/y", "a/x")]
    assert names_of(list(map(RunData, dirs))) == ["a/x", "b/x", "y", "a/x (2)"]
    assert names_of([RunData(dirs[0])]) == ["x"]


def test_a_directory_without_records_is_refused_and_one_of_a_starting_run_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no records of a run"):
        open_run(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        open_run(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        open_run(tmp_path / ("n" * 300))
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl' cannot be read: Is a directory"):
        open_run(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "launch.json").write_text("{}")
    assert open_run(tmp_path).follow().num_records == 0


def launch(run_dir: Path, **trainer: Any) -> None:
    tasks = [{"role": "instance", "state": "failed", "cause": "of an instance"}, {"role": "trainer", **trainer}]
    (run_dir / "launch.json").write_text(json.dumps({"engine": "local", "tasks": tasks}))


def test_a_run_goes_on_while_its_trainer_holds_the_lease_and_is_finished_with_its_last_iteration(
    tmp_path: Path,
) -> None:
    lease = take_lease(tmp_path, 20.0)
    launch(tmp_path, state="failed", cause="an earlier start")
    assert about_run(tmp_path, 2, 3)["state"] == "running"
    lease.release()
    assert about_run(tmp_path, 3, 3) == {"state": "finished", "cause": None, "log": [], "settings": {}}


def test_a_run_that_failed_shows_why_and_the_end_of_its_log(tmp_path: Path) -> None:
    take_lease(tmp_path, 20.0).release()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("".join(f"line {i}\n" for i in range(99)) + "API_KEY=abcdef\n")
    launch(tmp_path, state="failed", cause="RewardError: row 3\nfrom trainer", log="elsewhere/logs/trainer.log")
    about = about_run(tmp_path, 2, 3)
    assert about["state"] == "failed after 2 of 3 iterations" and about["cause"].startswith("RewardError: row 3")
    assert len(about["log"]) == NUM_LOG_LINES and about["log"][-2:] == ["line 98", "API_KEY=***"]
    launch(tmp_path, state="running")
    assert about_run(tmp_path, 2, 3)["state"] == "stopped after 2 of 3 iterations"
    assert about_run(tmp_path, 2, 3)["log"] == []


def test_settings_are_by_their_dotted_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"train": {"iterations": 3}, "run": {"dir": "x"}, "odd": 3}))
    assert about_run(tmp_path, 0, None)["settings"] == {"train.iterations": "3", "run.dir": '"x"'}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"tasks": 3}', '{"tasks": [3, {"role": "trainer", "log": 5}]}'])
def test_files_that_are_broken_or_missing_are_left_out(tmp_path: Path, content: str) -> None:
    for name in ("config.json", "launch.json"):
        (tmp_path / name).write_text(content)
    about = about_run(tmp_path, 0, None)
    assert about["state"] == "0 iterations are trained" and about["cause"] is None
