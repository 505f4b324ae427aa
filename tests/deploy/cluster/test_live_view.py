"""The live view at any size of a terminal, with figures that are missing, equal, zero, huge or null."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from async_rl.shared.protocol.fleet import FleetInfo, InstanceInfo
from deploy.cluster.live_view import (
    LiveView,
    PoolRow,
    PoolWatch,
    bars,
    figures,
    pool,
    rows_of_fleet,
    rows_of_proof,
    sparkline,
)
from deploy.cluster.run_view import clock

MakeRecord = Callable[..., dict[str, Any]]

INSTANCES = tuple(PoolRow(f"10.0.0.{i}:8000", "ready", 0.02, 100.0, 3) for i in range(50))
EXTREMES: tuple[dict[str, Any], ...] = (
    {},
    {"reward_mean": 0.0, "accuracy": 0.0, "kl": 0.0},
    {"reward_mean": -1e300, "accuracy": None, "entropy": None, "grad_norm": 1e300},
    {"reward_mean": 1e300, "overlap_efficiency": 0.5, "max_logprob_gap": 3e-7, "kl": 12.5},
    {"seconds": 0.0, "wait_s": 0.0, "train_s": 0.0, "publish_s": 0.0, "step_s": 0.0},
    {"seconds": 1e-9, "wait_s": 5.0},
)


def drawn(tmp_path: Path, records: list[dict[str, Any]], width: int, height: int) -> list[str]:
    """The lines of the view as a terminal of that size would show them."""
    console = Console(file=io.StringIO(), width=width, height=height)
    watch = PoolWatch(tmp_path, None)
    watch.rows = INSTANCES
    view = LiveView(console, watch)
    for record in records:
        view.show(record)
    with console.capture() as capture:
        console.print(view._render())
    return capture.get().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (60, 15), (30, 8), (12, 5), (5, 3)])
@pytest.mark.parametrize("num_records", [0, 1, 1000])
def test_it_fits_into_any_terminal(tmp_path: Path, record: MakeRecord, size: tuple[int, int], num_records: int) -> None:
    records = [record(i, iterations=2000, **EXTREMES[i % len(EXTREMES)]) for i in range(num_records)]
    lines = drawn(tmp_path, records, *size)
    width, height = size
    # The last line is the cursor's; a frame with one line has three.
    assert len(lines) <= max(height - 1, 3), lines
    assert all(cell_len(line) <= width for line in lines)


def test_a_terminal_of_80_by_24_shows_every_part(tmp_path: Path, record: MakeRecord) -> None:
    figures_too = {"kl": 0.01, "entropy": 1.5, "max_logprob_gap": 1e-6, "overlap_efficiency": 0.8}
    queue = {"queue_groups_max": 5, "queue_wait_s_mean": 0.25, "desired_instances": 4}
    records = [record(i, iterations=40, reward_mean=i / 20, **figures_too, **queue) for i in range(20)]
    shown = "\n".join(drawn(tmp_path, records, 80, 24))
    for part in (
        "iteration 19, 20/40 done",
        "to go",
        "reward",
        "accuracy",
        "entropy",
        "KL",
        "gap, largest",
        "overlap",
        "▁▁▂",
    ):
        assert part in shown, part
    for part in ("10.0.0.0:8000", "ready", "more", "queue: up to 5 groups, 0.25 s each", "4 would balance", "waiting"):
        assert part in shown, part


@pytest.mark.parametrize("size", [(50, 15), (40, 12), (80, 10)])
def test_a_small_terminal_shows_figures_and_where_the_time_went(
    tmp_path: Path, record: MakeRecord, size: tuple[int, int]
) -> None:
    records = [record(i, entropy=1.0, kl=0.1, truncated_share=0.1, overlap_efficiency=0.8) for i in range(8)]
    shown = "\n".join(drawn(tmp_path, records, *size))
    for part in ("reward", "accuracy", "█", "train", "wait", "other", " s "):
        assert part in shown, part


def test_the_mean_names_how_many_iterations_it_is_of(record: MakeRecord) -> None:
    heads = [[str(column.header) for column in figures([record(i) for i in range(n)], 80, 9).columns] for n in (3, 30)]
    assert heads[0][2] == "mean of 3" and heads[1][2] == "mean of 10"


def test_a_bar_is_as_long_as_its_iteration_and_divided_as_its_time_was(record: MakeRecord) -> None:
    # Of 2 s: 0.4 waiting, 1.3 training and step, 0.1 publishing.
    text = bars([record(0), record(1, seconds=4.0, wait_s=2.4)], width=58, height=5).plain.splitlines()
    half, whole, legend = text
    assert [half.count(symbol) for symbol in "▒█░·"] == [1, 13, 4, 2], half
    assert [whole.count(symbol) for symbol in "▒█░·"] == [1, 13, 24, 2], whole
    assert "publishing" in legend and "waiting" in legend


def test_a_figure_that_became_null_keeps_its_curve_and_shows_no_value(record: MakeRecord) -> None:
    records = [record(0, grad_norm=1.0), record(1, grad_norm=2.0), record(2, grad_norm=None)]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(figures(records, 80, 20))
    (line,) = [line for line in capture.get().splitlines() if "gradient norm" in line]
    assert line.split()[2] == "-" and "▁█" in line


def test_instances_that_do_not_fit_are_counted(record: MakeRecord) -> None:
    table = pool(INSTANCES, width=80, height=5)
    assert table.row_count == 4, "three instances, and how many there are besides"
    assert pool(INSTANCES[:4], width=80, height=5).row_count == 4


def test_shares_are_of_all_tokens_and_instances_in_trouble_come_first() -> None:
    infos = [
        InstanceInfo(name="a", url="http://a", state="ready", num_tokens=300, tokens_per_s=5.0, num_requests=2),
        InstanceInfo(name="b", url="http://b", state="dead", num_tokens=100),
    ]
    assert rows_of_fleet(FleetInfo(instances=infos)) == (
        PoolRow("b", "dead", 0.25, 0.0, 0),
        PoolRow("a", "ready", 0.75, 5.0, 2),
    )
    assert rows_of_fleet(FleetInfo(instances=[])) == ()
    idle = [InstanceInfo(name="a", url="http://a", state="joining")]
    assert rows_of_fleet(FleetInfo(instances=idle))[0].share == 0.0


@pytest.mark.parametrize("gaps", [None, [], {"instances": 5}, {"instances": {"a": None, "b": {"tokens": "x"}}}])
def test_a_proof_of_something_else_has_no_instances(gaps: Any) -> None:
    assert rows_of_proof({"logprob_gaps": gaps}) == ()


def test_without_a_fleet_the_shares_are_those_of_the_last_proof(tmp_path: Path) -> None:
    proofs = [{"logprob_gaps": {"instances": {"http://a": {"tokens": a}, "http://b": {"tokens": 30}}}} for a in (1, 90)]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(proof) + "\n" for proof in proofs))
    watch = PoolWatch(tmp_path, None)
    watch.look()
    assert watch.rows == (PoolRow("http://a", "", 0.75), PoolRow("http://b", "", 0.25)) and not watch.has_fleet


def test_names_of_instances_cannot_draw_in_the_terminal() -> None:
    console = Console(width=80, force_terminal=True)
    with console.capture() as capture:
        console.print(pool([PoolRow("a\x1b[2J[red]b", "ready", 1.0)], 80, 5))
    assert "\x1b[2J" not in capture.get() and "[red]b" in capture.get()


def test_a_sparkline_keeps_its_width_and_its_ends() -> None:
    assert sparkline([0.0, 1.0], 60) == "▁█"
    line = sparkline([i / 99 for i in range(100)], 20)
    assert len(line) == 20
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([-3.0, 7e9], 60) == "▁█" and sparkline([5.0] * 4, 60) == "▁▁▁▁"
    assert len(sparkline([float(i) for i in range(7)], 3)) == 3 and sparkline([1.0], 0) == "▁"


def test_the_clock_shows_hours_from_an_hour_on() -> None:
    assert [clock(seconds) for seconds in (-1.0, 59.9, 61, 3599, 3661)] == ["0:00", "0:59", "1:01", "59:59", "1:01:01"]
