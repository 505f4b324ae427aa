"""The Grafana dashboard asks for what the fleet endpoint exposes, all of it, and lies on Grafana's grid."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.config.pool_section import PoolSection
from async_rl.rollouts.fleet.metrics import RUN_GAUGES, FleetMetrics
from async_rl.rollouts.pool.inference_pool import InferencePool
from tests.support import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "kubernetes" / "chart" / "files" / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]


@pytest.fixture
def pool() -> Iterator[InferencePool]:
    pool = InferencePool(PoolSection(instances=("http://10.0.0.1:8000",)))
    yield pool
    asyncio.run(pool.close())


def exposed(pool: InferencePool) -> dict[str, set[str]]:
    """Sample names at the endpoint, as they are scraped, and the labels of each."""
    metrics = FleetMetrics(lambda: pool.members)
    metrics.record_iteration(dict.fromkeys(RUN_GAUGES, 1))
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_it_asks_for_all_that_is_exposed_and_for_nothing_else(pool: InferencePool) -> None:
    asked = {name for query in QUERIES for name in re.findall(r"\basync_rl_\w+", query)}
    assert asked == exposed(pool).keys(), "give each a panel in deploy/kubernetes/chart/files/dashboard.json"
    listed = (ROOT / "docs" / "elastic_pool.md").read_text()
    # In full, or what it has beyond the prefix of those beside it.
    assert all(any(name.removeprefix(f"async_rl{of}") in listed for of in ("_instance", "")) for name in asked)


def test_it_groups_and_names_by_labels_that_are_there(pool: InferencePool) -> None:
    labels_of = exposed(pool)
    for panel in PANELS:
        for target in panel.get("targets", ()):
            (name, *_) = re.findall(r"\basync_rl_\w+", target["expr"])
            known = labels_of[name] | {"job"}  # Prometheus' own, of the scrape.
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, panel["title"]
            assert {
                each for group in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for each in group.split(", ")
            } <= known


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_is_limited_to_the_chosen_runs_and_closes_its_brackets(query: str) -> None:
    assert len(re.findall(r"\basync_rl_\w+", query)) == query.count('job=~"$job"')
    assert all(query.count(left) == query.count(right) for left, right in ("()", "[]", "{}"))


def test_panels_have_their_own_places_and_numbers() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
