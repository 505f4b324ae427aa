"""The benchmark's runs are real, and what it compares comes from their records."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.plan import AT_ONCE, OTHERS, compare, drift_between
from deploy.scaling.simulation import SetUp

pytestmark = pytest.mark.distributed


def test_a_synchronous_run_is_simulated_from_a_periodic_one(tmp_path: Path) -> None:
    found = compare(tmp_path, "tiny", 7, ["synchronous"], {})["synchronous"]
    assert found["ratio"] == found["simulated_s"] / found["measured_s"]
    # On a machine that does other work meanwhile.
    assert 0.3 < found["ratio"] < 3
    neighbours = [
        drift_between(tmp_path / "beside", tmp_path / f"before_{name}") for name in ("synchronous", "the_end")
    ]
    assert found["drift"] == fmean(neighbours)
    assert found["ratio_without_drift"] == pytest.approx(found["ratio"] * found["drift"])


def test_drift_is_that_of_the_same_iterations(tmp_path: Path) -> None:
    for name, seconds in {"first": (9, 1, 1, 2, 4, 50, 70), "again": (1, 1, 1.5, 3, 6)}.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"seconds": each}) + "\n" for each in seconds]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    assert drift_between(tmp_path / "first", tmp_path / "again") == 1.5


def test_each_other_set_up_is_another_one() -> None:
    own = SetUp(max_running=AT_ONCE)
    set_ups = {name: (other.set_up(own), other.prompts, other.responses) for name, other in OTHERS.items()}
    assert len(set(set_ups.values())) == len(OTHERS)
    assert set_ups["as it is"] == (own, None, None)
