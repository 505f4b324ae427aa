"""The benchmark of the dashboard runs as a user starts it, and what it measures stays within generous bounds."""

import json

import pytest

from tests.support.make_target import make

pytestmark = pytest.mark.distributed

# Thirty times what this size takes on two quiet cores: only what grows with the whole timeline per request fails.
PERIOD_S = 1.0
PEAK_MB = 300


def test_a_period_is_answered_without_reading_the_whole_timeline() -> None:
    found = json.loads(make("bench-dashboard", "--iterations 120 --groups 128").splitlines()[-1])
    assert found["timeline_mb"] > 7
    assert 0 < found["period_s"] < PERIOD_S
    assert found["server_start_mb"] <= found["server_peak_mb"] < PEAK_MB
    assert 0.2 < found["report_mb"] < 10
