"""The benchmark of turns runs, and counts what the instances computed."""

import pytest

from benchmarks.turns import Load, run

pytestmark = pytest.mark.distributed


def test_later_turns_stay_and_compute_less() -> None:
    load = Load(rollouts=24, group_size=2, turns=4, prompt_tokens=40, turn_tokens=8, tool_tokens=8, tool_s=0.02)
    found = run("tiny", load, repeats=1)
    assert found["cached.home_share"] > found["anywhere.home_share"]
    assert 0 < found["cached.computed_share"] < found["anywhere.computed_share"] < 1
    assert found["cached.cpu_ms_per_token"] > 0 and found["cpu_ratio"] > 0
