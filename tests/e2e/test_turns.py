"""Pools that take turns, on a CPU: instances sleep while the trainer trains; faults in between; the same bits."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.local_run import EVALUATION, Run
from tests.support.same_run import assert_same_run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

SETTINGS = (
    "--train.iterations=8",
    "--train.order=prompt",
    "--checkpoint.every=1",
    "--train.exact=true",
    "--algorithm.kl_coef=0.05",
)


def make_run(folder: Path, model: Path) -> Run:
    run = Run(folder, model)
    run.config.write_text(run.config.read_text() + EVALUATION.format(source=folder / "rows.jsonl"))
    return run


def words(run: Run, placement: str) -> list[str]:
    snapshots = f"--publish.snapshot_dir={run.dir.parent}/snapshots"
    return [*SETTINGS, "--publish.transport=snapshot", snapshots, f"--run.placement={placement}"]


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Run:
    run = make_run(tmp_path_factory.mktemp("separate"), tiny_model("qwen3", tied=True))
    return run.train(*words(run, "separate"))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Run:
    """In turns; an instance hangs when it should sleep, one is lost while it is asked or asleep, then the trainer."""
    run = make_run(tmp_path_factory.mktemp("turns"), tiny_model("qwen3", tied=True))
    run.start(*words(run, "turns"), "--inference.num_instances=2", "--publish.timeout_s=10")
    run.wait_for_iterations(1)
    run.hold()
    run.wait_until(lambda: not any(member.num_requests for member in run.members()))
    run.hang_instance()
    run.tell("")
    run.wait_for_iterations(2)
    run.instances()[0].kill()
    run.wait_for_iterations(4)
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    return run


def test_it_trains_the_same_bits_whatever_is_lost(disturbed: Run, separate: Run) -> None:
    assert_same_run(disturbed, separate)
    assert all(record["on_policy"] for record in disturbed.lines("metrics.jsonl"))


def test_one_that_hangs_is_ended_before_the_trainer_takes_the_device(disturbed: Run) -> None:
    said = disturbed.everything_said()
    (hung,) = re.findall(r"trainer: (http://\S+) holds memory that the trainer needs: it did not go to sleep", said)
    assert f"the launcher has ended {hung} and starts them again" in said
    assert f"did not go to sleep: instance {hung} did not answer POST /sleep" in said.partition("launcher has")[0]


def test_a_trainer_loads_only_after_instances_of_an_earlier_start_have_left_the_devices(disturbed: Run) -> None:
    log = (disturbed.dir / "logs" / "trainer.log").read_text()
    before, *starts = log.split("no instance has the devices: the trainer loads")
    assert "starting at iteration" not in before
    # Of the run, and of its trainer that was killed; a third where both instances were lost at once.
    assert len(starts) >= 2 and {start.count("starting at iteration") for start in starts} == {1}


def test_evaluations_are_made_before_the_instances_sleep(disturbed: Run, separate: Run) -> None:
    of_both = [
        [{key: row[key] for key in ("iteration", "set", "reward_mean")} for row in run.lines("evaluations.jsonl")]
        for run in (disturbed, separate)
    ]
    assert {row["iteration"] for row in of_both[1]} == {0, 2, 4, 6, 8}
    assert {json.dumps(row) for row in of_both[0]} == {json.dumps(row) for row in of_both[1]}


def test_no_other_number_of_instances_is_advised(disturbed: Run, separate: Run) -> None:
    assert {record["desired_instances"] for record in disturbed.lines("metrics.jsonl")} == {None}
    assert "inference idled" in (said := disturbed.output.read_text()) and "would balance" not in said
    assert None not in {record["desired_instances"] for record in separate.lines("metrics.jsonl")}


def test_nothing_is_trained_before_all_is_rolled_out(disturbed: Run) -> None:
    for record in disturbed.lines("metrics.jsonl"):
        groups = [row for row in disturbed.lines("timeline.jsonl") if row["iteration"] == record["iteration"]]
        assert groups
        assert max(row["finished_s"] for row in groups) <= min(row["train_started_s"] for row in groups)
