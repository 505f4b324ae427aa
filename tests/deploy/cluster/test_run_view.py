import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.cluster.live_view import LiveView, PoolWatch, make_run_view
from deploy.cluster.run_view import PlainView, RunFeed, shown_records, time_shares
from tests.support.clock import Clock

MakeRecord = Callable[..., dict[str, Any]]


HOSTILE: tuple[Any, ...] = (None, "x", True, [], {}, 10**400, -1e308, float("nan"), float("inf"))
OPTIONAL = (
    "reward_mean",
    "response_tokens_mean",
    "tokens_per_s",
    "accuracy",
    "turns_mean",
    "untrained_groups",
    "skipped_steps",
    "started_unix_s",
    "queue_groups_max",
    "queue_wait_s_mean",
    "desired_instances",
    "grad_norm",
    "merged_share",
)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("terminal", [True, False])
def test_figures_that_are_null_or_no_number_do_not_end_a_view(
    record: MakeRecord, value: Any, terminal: bool, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=terminal)
    rows = [record(i, **dict.fromkeys(OPTIONAL, value)) for i in range(3)]
    with make_run_view(console, tmp_path, None) as view:
        for shown in shown_records(rows):
            view.show(shown)
    assert "3/3" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:9])
@pytest.mark.parametrize("name", ["seconds", "train_s", "iteration", "num_groups"])
def test_a_record_without_what_every_view_shows_is_left_out(record: MakeRecord, name: str, value: Any) -> None:
    assert list(shown_records([{**record(0), name: value}, record(1)])) == list(shown_records([record(1)]))


def test_the_view_is_plain_where_no_one_watches(tmp_path: Path) -> None:
    assert isinstance(make_run_view(Console(file=io.StringIO()), tmp_path, None), PlainView)
    assert isinstance(make_run_view(Console(file=io.StringIO(), force_terminal=True), tmp_path, None), LiveView)


def test_the_view_is_plain_where_nothing_can_be_drawn(tmp_path: Path) -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for console in (dumb, Console(file=ascii_file, force_terminal=True)):
        view = make_run_view(console, tmp_path, None)
        assert isinstance(view, PlainView)
        view.note("caf\xe9")
    ascii_file.flush()
    assert ascii_file.buffer.getvalue() == b"caf?\n"  # type: ignore[attr-defined]


def test_the_plain_view_prints_the_first_every_tenth_and_the_last_iteration(record: MakeRecord) -> None:
    console = Console(file=io.StringIO(), width=200)
    with PlainView(console) as view:
        for iteration in range(25):
            view.show(record(iteration, iterations=25))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition(" done")[0] for line in lines[:-1]] == [
        "iteration 0, 1/25",
        "iteration 9, 10/25",
        "iteration 19, 20/25",
        "iteration 24, 25/25",
    ]
    assert "waiting 20%  training 65%  publishing 5%  other 10%" in lines[0]


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_plain_view_is_never_silent_for_long(record: MakeRecord) -> None:
    console, clock = Console(file=io.StringIO(), width=200), Clock()
    view = PlainView(console, clock)
    for _ in range(700):
        clock.sleep(0.1)
        view.tick()
    assert lines_of(console) == [f"waiting for the first iteration, {said} so far" for said in ("0:30", "1:00")]
    view.show(record(0, iterations=9))
    for iteration in range(1, 5):
        clock.sleep(20)
        view.show(record(iteration, iterations=9))
    clock.sleep(45)
    view.tick()
    heads = [line.partition("  ")[0] for line in lines_of(console)[2:]]
    assert heads == [f"iteration {i}, {i + 1}/9 done" for i in (0, 2, 4, 4)]
    assert lines_of(console)[-1] == "iteration 4, 5/9 done  waiting for iteration 5, 0:45 so far"


def test_a_feed_shows_iterations_evaluations_and_warnings(tmp_path: Path, record: MakeRecord) -> None:
    console = Console(file=io.StringIO(), width=200)
    view, feed = PlainView(console), RunFeed(tmp_path)
    evaluation = {"iteration": 0, "set": "held-out", "num_prompts": 20, "total_prompts": 20, "avg@1": 0.25}
    cut_short = {"iteration": 1, "set": "held-out", "num_prompts": 3, "total_prompts": 20, "delay_s": 2.0, "seconds": 5}
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (evaluation, cut_short)))
    other = json.dumps({**record(1), "seconds": None})
    (tmp_path / "metrics.jsonl").write_text(f'{{}}\n{other}\n{json.dumps(record(0))}\n{{"iteration": 1, "sec')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "notices.jsonl").write_text('{"unix_s": 1, "text": "2 of 9 prompts are left out"}\n')
    assert feed.show_new(view) == record(0)
    notice, iteration, complete, incomplete = lines_of(console)
    assert notice == "trainer: 2 of 9 prompts are left out" and iteration.startswith("iteration 0, 1/3 done")
    assert complete.startswith("evaluation at iteration 0, held-out: avg@1 0.250, 20 of 20 prompts, 0.0 s, training")
    assert "NO FIGURES: 3 of 20 prompts were answered before training had to go on; 5.0 s" in incomplete
    assert feed.show_new(view) is None and len(lines_of(console)) == 4
    for resumed in (feed, RunFeed(tmp_path)):
        (tmp_path / "new").write_text(json.dumps(evaluation) + "\n")
        (tmp_path / "new").replace(tmp_path / "evaluations.jsonl")
        (tmp_path / "new").write_text(json.dumps(record(0)) + "\n")
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
        assert resumed.show_new(view) is None
        assert len(lines_of(console)) == 4, "a run that resumed has cut the files"
    again = {**record(0), "started_unix_s": 99.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    assert feed.show_new(view) == again, "an iteration that is trained again is another one"


def test_the_canary_and_evaluations_have_shares_of_their_own(record: MakeRecord) -> None:
    shares = time_shares([record(0, publish_s=0.1, canary_s=0.06, evaluation_s=0.2)])
    assert shares["publishing"] == pytest.approx(0.02) and shares["canary"] == pytest.approx(0.03)
    assert shares["evaluating"] == pytest.approx(0.1) and sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_both_views_end_with_advice_unless_the_run_failed(record: MakeRecord, terminal: bool, tmp_path: Path) -> None:
    for error in (None, RuntimeError("lost")):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
        with contextlib.suppress(RuntimeError), make_run_view(console, tmp_path, None) as view:
            view.show(record(0, desired_instances=3))
            if error:
                raise error
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("3 instances would balance the pools, 2 took part" in shown) == (error is None)


def test_the_live_view_shows_figures_and_time_to_go(record: MakeRecord, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveView(console, PoolWatch(tmp_path, None)) as view:
        view.show(record(0))
        view.note("lost [an] instance")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "iteration 0, 1/3 done" in shown
    assert "0:04 to go" in shown
    assert "tokens/s" in shown and "500" in shown
    assert "lost [an] instance" in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_publish_kept_of_adapters_is_shown_where_there_are_any(
    record: MakeRecord, terminal: bool, tmp_path: Path
) -> None:
    for figure in ({}, {"merged_share": 0.9871}):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=200, height=40)
        with make_run_view(console, tmp_path, None) as view:
            view.show(record(0, **figure))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("adapters kept" in shown) == ("98.7%" in shown) == bool(figure)


def test_time_shares_add_up_to_one(record: MakeRecord) -> None:
    shares = time_shares([record(0), record(1)])
    assert shares == pytest.approx({"waiting": 0.2, "training": 0.65, "publishing": 0.05, "other": 0.1})
