"""One real run of a config that `async-rl init` wrote: it ends well, and uses the memory that was forecast."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.memory import forecasts, measured_peaks
from deploy.init.__main__ import main as init
from deploy.local.check import main as check

# A fork shares what its interpreter has imported.
pytestmark = [pytest.mark.distributed, pytest.mark.cold]

TOLERANCE = 0.15
"""What `async-rl check` promises; at this size nearly all of it is the base of a process."""


@dataclass(frozen=True)
class Done:
    folder: Path
    forecast: dict[str, int]
    measured: dict[str, int]


@pytest.fixture(scope="module")
def done(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(tiny_model("qwen3", tied=True), folder / "model")
    rows = ({"question": f"Say {i}", "solution": f"{i}"} for i in range(32))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / "run.toml"
    words = [str(folder / "model"), str(folder / "rows.jsonl"), "-o", str(config), "--run-dir", str(folder / "run")]
    assert init(words) == 0
    return Done(folder, forecasts(config), measured_peaks(config, "--train.iterations", "2"))


def test_what_init_writes_trains(done: Done) -> None:
    records = [json.loads(line) for line in (done.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [0, 1]


def test_check_finds_that_the_run_directory_is_in_use_by_then(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([str(done.folder / "run.toml")]) == 2
    assert "run.dir" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["trainer", "instance"])
def test_the_forecast_is_near_the_measured_peak(role: str, done: Done) -> None:
    assert done.forecast[role] == pytest.approx(done.measured[role], rel=TOLERANCE)
