"""`async-rl plan` with and without the dock and tail scheduling, and with changes in place of all weights."""

import contextlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.scaling.__main__ import main
from deploy.scaling.costs import measure
from deploy.scaling.publish import DELAY_S, FINDING_S, ONCE_S, PIECE_S, passing_s
from deploy.scaling.what_if import with_changes
from tests.deploy.scaling.test_costs import COSTS, SET_UP, with_config, with_metrics, with_rows, write_run

NUM_BYTES = 200_000_000
HOP_S = DELAY_S + PIECE_S

SIZES = ("--instances=8", "--replicas=6", "--prompts=120")
"""So many that groups wait for room at an instance."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publishes of 200 MB in 0.4 s to two instances."""
    path = tmp_path_factory.mktemp("what_if") / "run"
    write_run(path, random.Random(0))
    with_metrics(publish_bytes=NUM_BYTES)(path)
    return path


@pytest.fixture(scope="module")
def usual(run_dir: Path) -> dict[str, Any]:
    return said_of(run_dir, *SIZES)


def said_of(path: Path, *arguments: str) -> dict[str, Any]:
    text = text_of(path, *arguments, "--json")
    said: dict[str, Any] = json.loads(text)
    return said


def text_of(path: Path, *arguments: str) -> str:
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        assert main([str(path), *arguments]) == 0
    return written.getvalue()


@pytest.mark.parametrize("switches", [["dock"], ["tail"], ["dock", "tail"]])
def test_schedules_are_compared_with_those_of_the_run(
    switches: Sequence[str], run_dir: Path, usual: dict[str, Any]
) -> None:
    said = said_of(run_dir, *SIZES, *(f"--without={name}" for name in switches))
    assert usual["as_the_run"] is None and said["as_the_run"] == usual["schedules"]
    for each in said["set_ups"]:
        assert (each["has_dock"], each["has_tail"]) == ("dock" not in switches, "tail" not in switches)
    assert said["set_ups"][1]["seconds"] == said["schedules"]["periodic"]
    assert said["schedules"]["periodic"] > usual["schedules"]["periodic"]
    assert len(said["schedules"]) == 4 and said["costs"] == usual["costs"]


def test_the_best_split_of_many_devices_may_be_another_one_without(run_dir: Path) -> None:
    found = said_of(run_dir, "--devices=48", "--without=dock", "--without=tail", "--prompts=64")["set_ups"]
    assert len(found) > 2 and not any(each["has_dock"] or each["has_tail"] for each in found)
    # To three digits.
    assert found[1]["seconds"] == pytest.approx(min(each["seconds"] for each in found[1:]), rel=0.005)


def test_a_publish_grows_with_the_instances_from_the_measured_one(run_dir: Path, usual: dict[str, Any]) -> None:
    further_s = passing_s(NUM_BYTES, COSTS.publish_s, SET_UP.num_instances)
    assert further_s == pytest.approx((0.3 - 2 * HOP_S) / (191 + 1) + HOP_S)
    costs, (now, other) = usual["costs"], usual["set_ups"]
    assert costs["passing_s"] == pytest.approx(further_s)
    assert costs["publish_s"] + further_s == pytest.approx(COSTS.publish_s)
    constant = said_of(run_dir, *SIZES, "--cost=passing_s=0")["set_ups"]
    assert now["seconds"] - constant[0]["seconds"] == pytest.approx(further_s)
    assert other["seconds"] - constant[1]["seconds"] == pytest.approx(7 * further_s)


def test_the_publish_is_compared_with_a_tree_and_with_one_after_the_other(run_dir: Path) -> None:
    said, text = said_of(run_dir, "--instances=63"), text_of(run_dir, "--instances=63")
    ways, costs = said["publish"], said["costs"]
    assert ways["chain"] == pytest.approx(costs["publish_s"] + 62 * costs["passing_s"])
    bytes_s = 191 * (costs["passing_s"] - PIECE_S - DELAY_S)
    assert ways["star"] == pytest.approx(costs["publish_s"] + 62 * bytes_s)
    assert ways["tree"] == pytest.approx(costs["publish_s"] + 5 * bytes_s, rel=0.01)
    share = ways["chain"] / said["set_ups"][1]["seconds"]
    assert f"publish to instances: 63: {1000 * ways['chain']:.3g} ms, {share:.1%} of the iteration; through a" in text
    # One that took no longer than what it does besides tells nothing of a link.
    short = ("--instances=63", f"--cost=passing_s={HOP_S}")
    assert said_of(run_dir, *short)["publish"].keys() == {"chain"} and "through a tree" not in text_of(run_dir, *short)


def test_where_no_bytes_are_known_to_pass_from_one_to_the_next_a_publish_is_constant(tmp_path: Path) -> None:
    for name, transport, num_bytes in (("snapshot", "snapshot", NUM_BYTES), ("unknown", "broadcast", None)):
        write_run(tmp_path / name, random.Random(0))
        with_metrics(publish_bytes=num_bytes)(tmp_path / name)
        with_config("publish", transport=transport)(tmp_path / name)
        run = measure(tmp_path / name)
        assert (run.costs.passing_s, run.chained_bytes, run.costs.publish_s) == (0, 0, COSTS.publish_s)
        assert "publish to instances" not in text_of(tmp_path / name)


def test_stages_pass_their_own_parts_at_the_same_time(tmp_path: Path) -> None:
    write_run(tmp_path / "run", random.Random(0))
    with_metrics(publish_bytes=NUM_BYTES)(tmp_path / "run")
    with_config("publish", transport="stages")(tmp_path / "run")
    with_config("trainer", tensor_parallel=1, pipeline_parallel=2)(tmp_path / "run")
    assert measure(tmp_path / "run").chained_bytes == NUM_BYTES / 2


def test_changes_are_fewer_bytes_that_are_found_first(run_dir: Path, usual: dict[str, Any]) -> None:
    said = said_of(run_dir, *SIZES, "--changes=0.1")
    costs, before = said["costs"], usual["costs"]
    sent_s = 0.1 * (before["publish_s"] - ONCE_S)
    assert costs == before | {"publish_s": pytest.approx(ONCE_S + sent_s + FINDING_S * NUM_BYTES)}
    less_s = before["publish_s"] - costs["publish_s"]
    for name, seconds in said["schedules"].items():
        assert seconds == pytest.approx(usual["schedules"][name] - less_s)
    assert said["as_the_run"] == usual["schedules"]
    further_s = before["passing_s"]
    assert said["changes"] == pytest.approx(
        {"all_s": before["publish_s"] + further_s, "changes_s": costs["publish_s"] + further_s}
    )
    assert "of all weights 0.4 s: changes are sent" in text_of(run_dir, "--changes=0.1")
    slow = [said_of(run_dir, "--cost=publish_s=4", *more)["publish"]["chain"] for more in ((), ("--changes=0.1",))]
    assert slow[1] < 0.3 * slow[0]
    # A message shorter than a piece is passed on as soon as it is there.
    few = said_of(run_dir, "--changes=0.0001")["costs"]
    assert few["passing_s"] == pytest.approx(0.001 * sent_s + PIECE_S + DELAY_S)


def test_all_weights_are_sent_where_finding_changes_takes_longer(run_dir: Path) -> None:
    given = "--cost=publish_s=0.2"
    said, without = said_of(run_dir, given, "--changes=0.1"), said_of(run_dir, given)
    assert said["changes"]["changes_s"] > said["changes"]["all_s"] > 0.2
    assert (said["costs"], said["publish"]) == (without["costs"], without["publish"])
    assert ": all weights are sent" in text_of(run_dir, given, "--changes=0.1")


def test_all_costs_that_the_records_allow_have_changes(run_dir: Path) -> None:
    run = measure(run_dir)
    changed, _ = with_changes(replace(run, others=(run.costs,)), run_dir, 0.1)
    assert changed.others == (changed.costs,) != (run.costs,)


def test_groups_are_expected_to_be_as_long_as_their_prompts_were(tmp_path: Path) -> None:
    """Each prompt comes in every iteration, every fourth one with responses of three times the length."""
    write_run(tmp_path / "run", random.Random(0))
    longer = with_rows(
        lambda row: {
            "prompt_id": f"p{row['index']}",
            "num_response_tokens": 240 if row["index"] % 4 == 0 else 80,
            "longest_rollout_tokens": 60 if row["index"] % 4 == 0 else 20,
        }
    )
    longer(tmp_path / "run")
    # The first iteration, which knows nothing, is not among these.
    for iteration in measure(tmp_path / "run").iterations:
        assert [each.expected for each in iteration.shapes] == pytest.approx([2, 2 / 3, 2 / 3, 2 / 3] * 6)


@pytest.mark.parametrize(
    ("section", "changes", "arguments", "message"),
    [
        ("train", {"order": "prompt"}, ["--without", "dock"], "--without dock: the run has none"),
        ("prompts", {"reserve": 3}, ["--without", "dock"], "--without dock: the run has none"),
        ("publish", {"transport": "changes"}, ["--changes", "0.1"], "publish.transport 'changes'"),
        (
            "inference",
            {"engine": "vllm"},
            ["--changes", "0.1"],
            "inference.engine 'vllm', and publishes of 200",
        ),
        ("train", {}, ["--changes", "0.6"], "--changes is 0.6: expected a share of the bytes, above 0 and at most 0.5"),
        ("train", {}, ["--changes", "0"], "--changes is 0.0: expected a share"),
        ("train", {}, ["--changes", "nan"], "--changes is nan: expected a share"),
        ("train", {}, ["--without", "delta"], "invalid choice: 'delta'"),
        ("train", {}, ["--graph", "--changes", "0.1"], "--changes is for the records of a run"),
        ("train", {}, ["--graph", "--without", "tail"], "--without is for the records of a run"),
    ],
)
def test_what_the_run_does_not_have_is_not_left_out(
    section: str,
    changes: dict[str, Any],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run", random.Random(0), num_iterations=6)
    with_metrics(publish_bytes=NUM_BYTES)(tmp_path / "run")
    with_config(section, **changes)(tmp_path / "run")
    try:
        code = main([str(tmp_path / "run"), *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2 and message in capsys.readouterr().err
