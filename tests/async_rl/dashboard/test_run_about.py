import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.dashboard.run_about import NUM_LOG_LINES, about_run
from async_rl.locks.lease import take_lease


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
