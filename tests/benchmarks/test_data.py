"""The benchmark of prompts runs as a user starts it, and reports each way to load them."""

import json

import pytest

from tests.support.make_target import make

pytestmark = pytest.mark.distributed


def test_each_source_is_loaded_first_and_again() -> None:
    found = json.loads(make("bench-data", "--rows 600").splitlines()[-1])
    assert [(each["source"], each["start"]) for each in found] == [
        (source, start) for source in ("rows.jsonl", "rows.parquet") for start in ("first", "resumed", "resumed")
    ]
    for each in found:
        assert 0 < each["prompts"] <= 600 and each["load_cpu_s"] >= 0 and each["peak_mb"] > 0
