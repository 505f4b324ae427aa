"""`async-rl trace` on files that a run may leave: rotated, half-written, or broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import ConfigError
from deploy.trace import QUEUE_PID, TRAINER_PID, main, trace_of

GAPS = {"http://a": {"tokens": 4}, "http://b": {"tokens": 9}}


def record(iteration: int, **changes: Any) -> dict[str, Any]:
    spans = [["publish", 0.0, 1.0], ["period", 1.0, 9.0], ["step", 9.0, 10.0]]
    return {"iteration": iteration, "started_unix_s": 1e9 + 10 * iteration, "seconds": 10.0, "spans": spans} | changes


def group(iteration: int, index: int, start_s: float) -> dict[str, Any]:
    times = {"started_s": start_s, "finished_s": start_s + 2, "train_started_s": 5.0, "train_finished_s": 8.0}
    return {"iteration": iteration, "index": index, "prompt_id": str(index), "logprob_gaps": GAPS, **times}


def write(path: Path, rows: list[dict[str, Any]], rest: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)


def events(run_dir: Path, num_periods: int = 10) -> list[dict[str, Any]]:
    return list(json.loads(trace_of(run_dir, num_periods))["traceEvents"])


def bars(run_dir: Path, pid: int, num_periods: int = 10) -> list[tuple[str, float, float]]:
    found = [event for event in events(run_dir, num_periods) if event["ph"] == "X" and event["pid"] == pid]
    return [(event["name"], event["ts"] / 1e6, event["dur"] / 1e6) for event in found]


def test_a_period_consists_of_its_windows_and_the_waits_between_them(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [record(0)])
    write(tmp_path / "timeline.jsonl", [group(0, 0, 1.0), group(0, 1, 1.5)])
    assert bars(tmp_path, TRAINER_PID) == [
        ("iteration 0", 0.0, 10.0),
        ("publish", 0.0, 1.0),
        ("period", 1.0, 8.0),
        ("wait", 1.0, 4.0),
        ("window", 5.0, 3.0),
        ("wait", 8.0, 1.0),
        ("step", 9.0, 1.0),
    ]
    assert bars(tmp_path, QUEUE_PID) == [("group 0", 3.0, 2.0), ("group 1", 3.5, 1.5)]
    named = {event["args"]["name"] for event in events(tmp_path) if event["ph"] == "M"}
    assert named == {"trainer", "queue", "http://b"}, "the instance that sampled most"
    rows = {event["tid"] for event in events(tmp_path) if event["pid"] >= 10 and event["ph"] == "X"}
    assert rows == {0, 1}, "rolled out at the same time"


def test_the_last_periods_are_found_in_rotated_files(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [record(iteration) for iteration in range(6)])
    write(tmp_path / "timeline.1.jsonl", [group(0, 0, 1.0), group(1, 0, 1.0), group(2, 0, 1.0)])
    write(tmp_path / "timeline.2.jsonl", [group(3, 0, 1.0), group(4, 0, 1.0)])
    write(tmp_path / "timeline.jsonl", [group(5, 0, 1.0)])
    assert [start for name, start, _ in bars(tmp_path, QUEUE_PID, 4)] == [3.0, 13.0, 23.0, 33.0]
    assert len([name for name, *_ in bars(tmp_path, TRAINER_PID, 4) if name.startswith("iteration")]) == 4


def test_what_is_half_written_or_no_record_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [record(0)], '[1]\n{"iteration": "x"}\n{"iteration": 1, "seco')
    other = {"iteration": 0, "index": 1, "prompt_id": "1"}
    write(tmp_path / "timeline.jsonl", [group(0, 0, 1.0), other, group(7, 0, 1.0)], "no JSON\n{")
    assert [name for name, *_ in bars(tmp_path, QUEUE_PID)] == ["group 0"], "a group of another replica has no times"


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": "ten"},
        {"seconds": None},
        {"seconds": float("nan")},
        {"seconds": 10**400},
        {"started_unix_s": "now"},
        {"spans": 5},
        {"spans": [["publish", 1]]},
        {"spans": [["publish", 1, None]]},
    ],
)
def test_a_broken_record_is_left_out(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path / "metrics.jsonl", [record(0, **changes)])
    with pytest.raises(ConfigError, match="has no complete iteration"):
        trace_of(tmp_path, 10)
    write(tmp_path / "metrics.jsonl", [record(0), record(1, **changes), record(2)])
    assert [name for name, *_ in bars(tmp_path, TRAINER_PID) if " " in name] == ["iteration 0", "iteration 2"]


def test_figures_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [record(0, reward_mean=float("nan"), loss=float("inf"), clip=0.5)])
    write(tmp_path / "timeline.jsonl", [group(0, 0, 1.0) | {"reward_mean": float("nan")}])
    events = json.loads(trace_of(tmp_path, 10))["traceEvents"]
    (figures,) = [event["args"] for event in events if event["name"] == "iteration 0"]
    assert figures["clip"] == 0.5 and not {"reward_mean", "loss"} & figures.keys()
    assert "reward_mean" not in next(event["args"] for event in events if event["name"] == "group 0")


@pytest.mark.parametrize("name", ["started_s", "finished_s", "train_started_s", "train_finished_s"])
@pytest.mark.parametrize("time", [None, "1", float("inf"), 10**400])
def test_a_group_with_a_broken_time_is_left_out(tmp_path: Path, name: str, time: object) -> None:
    write(tmp_path / "metrics.jsonl", [record(0)])
    write(tmp_path / "timeline.jsonl", [group(0, 0, 1.0), group(0, 1, 1.0) | {name: time}])
    assert [bar for bar, *_ in bars(tmp_path, QUEUE_PID)] == ["group 0"]


@pytest.mark.parametrize("gaps", [[1], {"a": {}}, {"a": 5}, 5, "http://a"])
def test_records_of_something_else_are_a_named_error(tmp_path: Path, gaps: object) -> None:
    write(tmp_path / "metrics.jsonl", [record(0)])
    write(tmp_path / "timeline.jsonl", [group(0, 0, 1.0) | {"logprob_gaps": gaps}])
    with pytest.raises(ConfigError, match="are not those of a run"):
        trace_of(tmp_path, 10)


def test_the_command_writes_the_file_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "has no complete iteration" in capsys.readouterr().err
    write(tmp_path / "metrics.jsonl", [record(0)])
    assert main([str(tmp_path), "--last", "3"]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert main([str(tmp_path), "-o", str(tmp_path / "no" / "such.json")]) == 2
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--last", "0"])
