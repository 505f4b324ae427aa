"""A run that is killed goes on from its newest checkpoint, and computes what it would have computed uninterrupted."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.local_run import Run, command_of, gone
from tests.support.same_run import SETTINGS, assert_same_run

pytestmark = pytest.mark.distributed


def finished(tmp_path: Path, model: Path, *settings: str) -> Run:
    tmp_path.mkdir()
    run = Run(tmp_path, model)
    run.start(*SETTINGS, *settings)
    assert run.finish() == 0, run.everything_said()
    return run


def kill_training(run: Run) -> None:
    """Kills every process of the trainer at once, as a lost machine would; the launcher ends the rest."""
    processes = [p for p in run.descendants() if {"trainer", "torch.distributed.run"} & set(command_of(p))]
    everything = run.descendants()
    for process in processes:
        process.kill()
    assert run.finish(60) != 0
    assert gone(everything)


def test_a_run_killed_in_any_phase_goes_on_as_if_it_had_not_been(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3", tied=True)
    expected = finished(tmp_path / "uninterrupted", model)
    (tmp_path / "killed").mkdir()
    run = Run(tmp_path / "killed", model)
    for number in (1, 4, 8):
        run.start(*SETTINGS, "--run.resume", "true")
        run.wait_for_iterations(number)
        time.sleep(random.uniform(0, 0.5))
        kill_training(run)
    run.start(*SETTINGS, "--run.resume", "true")
    assert run.finish() == 0, run.everything_said()
    assert_same_run(run, expected)


def test_a_run_goes_on_under_another_layout(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    run = finished(tmp_path / "run", tiny_model("qwen3", tied=True), "--train.iterations", "2")
    run.start(
        *SETTINGS,
        *("--run.resume", "true", "--train.iterations", "4", "--trainer.tensor_parallel", "2"),
    )
    assert run.finish() == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1, 2, 3]
    assert all(proof["on_policy"] and proof["max_logprob_gap"] < 1e-3 for proof in proofs)


def test_a_directory_with_records_is_refused_unless_the_run_resumes(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen3", tied=True)
    run = finished(tmp_path / "run", model, "--train.iterations", "1")
    run.start(*SETTINGS, "--train.iterations", "1")
    assert run.finish() != 0
    assert "holds the records of another run" in run.everything_said()
    run.start(*SETTINGS, "--train.iterations", "2", "--run.resume", "true", "--run.seed", "6")
    assert run.finish() != 0
    assert "run.seed is 6, but was 5" in run.everything_said()
    shutil.rmtree(run.dir / "checkpoints")
    run.start(*SETTINGS, "--train.iterations", "2", "--run.resume", "true")
    assert run.finish() == 0, run.everything_said()
    assert [record["iteration"] for record in run.lines("metrics.jsonl")] == [0, 1]


def test_nothing_is_left_of_a_killed_save(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    run = finished(tmp_path / "run", tiny_model("qwen3", tied=True), "--train.iterations", "3")
    names = sorted(path.name for path in (run.dir / "checkpoints").iterdir())
    assert names == ["iteration-000002", "iteration-000003"], "the newest two, and nothing else"
    assert not [p for p in psutil.process_iter() if str(run.dir) in " ".join(command_of(p))]
