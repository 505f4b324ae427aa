"""Charts are well-formed SVG whose marks stand where the figures say, whatever the figures are."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.quickstart.charts import BOTTOM, CURVE_HEIGHT, LEFT, RIGHT, TOP, WIDTH, curve, timeline

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=30)
SECONDS = st.floats(1e-3, 1e5)


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


@settings(max_examples=60, deadline=None)
@given(SHARES, st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=8))
def test_a_curve_goes_from_edge_to_edge_at_the_height_of_its_values(values: list[float], label: str) -> None:
    chart = ElementTree.fromstring(curve(values, label, "red", {label: (0, values[0])}))
    assert chart.attrib["aria-label"] == label
    measured, smoothed = map(points, chart.findall("polyline"))
    assert len(measured) == len(smoothed) == len(values)
    for (_, y), value in zip(measured, values, strict=True):
        # Coordinates have one decimal.
        assert (CURVE_HEIGHT - BOTTOM - y) / (CURVE_HEIGHT - BOTTOM - TOP) == pytest.approx(value, abs=1e-3)
    assert measured[0][0] == LEFT and all(one < other for (one, _), (other, _) in pairwise(measured))
    assert len(values) == 1 or measured[-1][0] == pytest.approx(WIDTH - RIGHT)
    (mark,) = chart.findall("circle")
    assert (float(mark.attrib["cx"]), float(mark.attrib["cy"])) == measured[0]


@settings(max_examples=60, deadline=None)
@given(SHARES)
def test_the_smoothed_curve_stays_within_the_values_and_leaves_a_constant_as_it_is(values: list[float]) -> None:
    chart = ElementTree.fromstring(curve(values, "", "red", {}))
    measured, smoothed = ([y for _, y in points(line)] for line in chart.findall("polyline"))
    assert min(measured) - 0.11 <= min(smoothed) and max(smoothed) <= max(measured) + 0.11
    assert smoothed[0] == measured[0]
    constant = ElementTree.fromstring(curve([values[0]] * 5, "", "red", {}))
    assert len({y for line in constant.findall("polyline") for _, y in points(line)}) == 1


@st.composite
def periods(draw: st.DrawFn) -> tuple[float, list[tuple[str, tuple[float, float], tuple[float, float]]]]:
    seconds = draw(SECONDS)
    spans = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda span: (min(span) * seconds, max(span) * seconds))
    return seconds, draw(st.lists(st.tuples(st.sampled_from(["p<1>", "q&"]), spans, spans), max_size=6))


@settings(max_examples=60, deadline=None)
@given(periods(), st.floats(0, 1))
def test_a_timeline_has_a_rollout_and_a_training_for_each_group_and_readable_ticks(
    period: tuple[float, list[tuple[str, tuple[float, float], tuple[float, float]]]], published: float
) -> None:
    seconds, rows = period
    chart = ElementTree.fromstring(timeline(rows, published * seconds, seconds, "a period"))
    publish, *bars = chart.findall("rect")
    width = WIDTH - LEFT - RIGHT
    assert float(publish.attrib["width"]) == pytest.approx(width * published, abs=0.1)
    spans = [span for _, rollout, training in rows for span in (rollout, training)]
    for bar, (start, end) in zip(bars, spans, strict=True):
        assert float(bar.attrib["x"]) == pytest.approx(LEFT + width * start / seconds, abs=0.1)
        # A span too short to be seen has one pixel.
        assert float(bar.attrib["width"]) == pytest.approx(max(1.0, width * (end - start) / seconds), abs=0.1)
    names = [(bar.findtext("title") or "").partition(":")[0] for bar in bars]
    assert names == [f"{name}, {what}" for name, *_ in rows for what in ("rollout", "training")]
    ticks = [text for text in chart.findall("text") if text.attrib["text-anchor"] == "middle"][:-1]
    assert 2 <= len(ticks) <= 11
