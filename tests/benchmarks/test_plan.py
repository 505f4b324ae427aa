"""The benchmark's runs are real, and what it compares comes from their records."""

from pathlib import Path

import pytest

from benchmarks.plan import AT_ONCE, OTHERS, compare
from deploy.scaling.simulation import SetUp

pytestmark = pytest.mark.distributed


def test_a_synchronous_run_is_simulated_from_a_periodic_one(tmp_path: Path) -> None:
    found = compare(tmp_path, "tiny", 7, ["synchronous"], {})["synchronous"]
    assert found["ratio"] == found["simulated_s"] / found["measured_s"]
    # On a machine that does other work meanwhile.
    assert 0.3 < found["ratio"] < 3


def test_each_other_set_up_is_another_one() -> None:
    own = SetUp(max_running=AT_ONCE)
    set_ups = {name: (other.set_up(own), other.prompts, other.responses) for name, other in OTHERS.items()}
    assert len(set(set_ups.values())) == len(OTHERS)
    assert set_ups["as it is"] == (own, None, None)
