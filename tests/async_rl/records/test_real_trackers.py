"""Trackers as their users have them, in an environment of their own (`make test-trackers`); all on this machine."""

import json
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.trackers, pytest.mark.distributed]

PYTHON = Path(os.environ.get("ASYNC_RL_TRACKERS_PYTHON", ".venv-trackers/bin/python"))


def log(tracker: str, tmp_path: Path, steps: str) -> None:
    """A run that logs these steps to a tracker of the machine's own."""
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    argv = [PYTHON.absolute(), "-m", "tests.support.tracker_run", tracker, tmp_path / "run", steps]
    (tmp_path / "run").mkdir(exist_ok=True)
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "the run goes on" not in done.stderr, done.stdout + done.stderr


def test_mlflow_has_each_step_once_the_samples_and_the_config_without_secrets(tmp_path: Path) -> None:
    for steps in ("0,1,2", "1,2,3"):
        log("mlflow", tmp_path, steps)
    (run,) = (path.parent for path in tmp_path.glob("mlruns/*/*/artifacts"))
    lines = [line.split() for line in (run / "metrics" / "loss").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in lines] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert (run / "metrics" / "pass_2").exists() and (run / "metrics" / "eval" / "held-out" / "pass_1").exists()
    table = json.loads((run / "artifacts" / "samples" / "iteration-3.json").read_text())
    assert dict(zip(table["columns"], table["data"][0], strict=True))["response"] == "answer 3"
    assert (run / "params" / "reward.api_key").read_text() == '"***"'
    assert json.loads((run / "artifacts" / "config.json").read_text())["run"] == {"seed": 7}


def test_trackio_has_each_step_once_the_samples_and_the_config_without_secrets(tmp_path: Path) -> None:
    for steps in ("0,1,2", "1,2,3"):
        log("trackio", tmp_path, steps)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics")]
        configs = [json.loads(text) for (text,) in database.execute("select config from configs")]
        names = set(database.execute("select run_name from metrics"))
    assert [(step, row["loss"]) for step, row in rows if "loss" in row] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    tables = [row["samples"]["_value"] for _, row in rows if "samples" in row]
    assert [table[0]["response"] for table in tables] == [f"answer {step}" for step in range(4)]
    assert len(names) == 1, "one run, which was resumed"
    assert configs[-1]["reward"] == {"name": "math", "api_key": "***"}


def test_wandb_has_each_step_once_as_one_run_and_the_samples(tmp_path: Path) -> None:
    for steps in ("0,1,2", "1,2,3"):
        log("wandb", tmp_path, steps)
    files = sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name)
    assert len(files) == 2 and len({file.name for file in files}) == 1, "two attempts under one id"
    # A file of records in binary, with names and JSON of their values as text.
    found = [file.read_bytes() for file in files]
    assert all(b"eval/held-out/pass@1" in content and b"hunter2" not in content for content in found)
    tables = [[path.name.split("_")[1] for path in file.parent.glob("files/media/table/*")] for file in files]
    assert [sorted(each) for each in tables] == [["0", "1", "2"], ["3"]]
