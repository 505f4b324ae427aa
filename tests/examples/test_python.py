"""The script and the notebooks of the Python interface run as they are, with a small model in place of theirs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.chat_tokenizer import make_chat_model
from tests.support.notebook import NAME

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))

pytest.importorskip("cloudpickle")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_chat_model(tmp_path / "model")
    return tmp_path / "model"


def python(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_the_script_trains_and_evaluates(tmp_path: Path, model: Path) -> None:
    said = python(tmp_path, str(EXAMPLES / "python" / "train.py"), str(model)).splitlines()
    assert [line.split()[0] for line in said if len(line.split()) == 2 and line[0].isdigit()] == ["0", "1"]
    assert (tmp_path / "runs" / "sums.html").stat().st_size > 100_000
    assert 0 <= float(said[-1]) <= 1


@pytest.mark.distributed
@pytest.mark.timeout(1000)
def test_the_script_of_trl_trains(tmp_path: Path, model: Path) -> None:
    said = python(tmp_path, str(EXAMPLES / "python" / "trl_grpo.py"), str(model)).splitlines()
    assert -1 < float(said[-1]) < 0 and (tmp_path / "runs" / "trl" / "model" / "config.json").is_file()


@pytest.mark.distributed
@pytest.mark.timeout(3000)
def test_the_notebooks_run_from_the_first_cell_to_the_last(tmp_path: Path, model: Path) -> None:
    said = {
        name: python(
            tmp_path, "-m", "tests.support.notebook", str(EXAMPLES / "notebooks" / f"{name}.ipynb"), str(model)
        )
        for name in ("first_run", "read_a_run", "own_reward", "agent")
    }
    assert "<iframe" in said["first_run"] and "exported" in said["first_run"]
    assert "runs/first': finished, 3 of 3 iterations" in said["read_a_run"] and "http://127.0.0.1" in said["read_a_run"]
    assert [line.split()[0] for line in said["agent"].splitlines() if re.fullmatch(r"\d [\d.]+ [\d.]+", line)] == [
        "0",
        "1",
    ]
    assert "KeyError: 'no such column'" in said["own_reward"]
    assert 'return [row["no such column"] for r in responses]' in said["own_reward"], "the line of the cell"


def test_every_notebook_is_run_and_has_no_results_of_anybody() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["agent", "first_run", "own_reward", "read_a_run"]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
        assert NAME in path.read_text() or path.stem == "read_a_run"
