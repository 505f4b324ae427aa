"""A run that is killed goes on from its newest checkpoint, and computes what it would have computed uninterrupted."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.local_run import Run, command_of, gone
from tests.support.same_run import ITERATIONS, SETTINGS, assert_same_run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Run:
    """A run that trained to its end; what goes on from it goes on from a copy."""
    run = Run(tmp_path_factory.mktemp("uninterrupted"), tiny_model("qwen3", tied=True))
    run.start(*SETTINGS)
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
    uninterrupted: Run, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    run = Run(tmp_path, tiny_model("qwen3", tied=True))
    for number in (1, 3, 5):
        # Of itself the launcher would start the trainer again, see test_restarts.py.
        run.start(*SETTINGS, "--run.resume", "true", "--cluster.max_restarts", "0")
        run.wait_for_iterations(number)
        time.sleep(random.uniform(0, 0.2))
        kill_training(run)
    run.start(*SETTINGS, "--run.resume", "true")
    assert run.finish() == 0, run.everything_said()
    assert_same_run(run, uninterrupted)


def test_a_killed_run_with_a_critic_and_several_steps_per_batch_goes_on_as_if_it_had_not_been(
    new_run: Callable[[str], Run],
) -> None:
    """Killed while its critic learns alone, and later; between two steps of a batch or wherever it is then."""
    of_critic = ("--algorithm.name=ppo", "--critic.learning_rate=1e-3", "--critic.iterations_alone=2")
    settings = (
        *SETTINGS,
        "--train.iterations=5",
        "--train.steps_per_batch=3",
        "--algorithm.old_policy=model",
        *of_critic,
    )
    run, uninterrupted = new_run("run"), new_run("uninterrupted")
    for number in (1, 3):
        run.start(*settings, "--run.resume=true", "--cluster.max_restarts=0")
        run.wait_for_iterations(number)
        time.sleep(random.uniform(0, 0.3))
        kill_training(run)
    run.start(*settings, "--run.resume=true")
    uninterrupted.start(*settings)
    for each in (run, uninterrupted):
        assert each.finish() == 0, each.everything_said()
    assert_same_run(run, uninterrupted)
    of_critic_too = ("value_loss", "value", "explained_variance", "critic_grad_norm")
    records, expected = run.lines("metrics.jsonl"), uninterrupted.lines("metrics.jsonl")
    assert [[record[key] for key in of_critic_too] for record in records] == [
        [record[key] for key in of_critic_too] for record in expected
    ]
    assert [record["learning_rate"] > 0 for record in records] == [False, False, True, True, True]
    assert len(run.lines("ledger.jsonl")) == 15


def test_a_run_goes_on_under_another_layout(uninterrupted: Run, tmp_path: Path) -> None:
    run = uninterrupted.copied_to(tmp_path / "run")
    more = ("--train.iterations", str(ITERATIONS + 2), "--trainer.tensor_parallel", "2")
    run.start(*SETTINGS, "--run.resume", "true", *more)
    assert run.finish() == 0, run.everything_said()
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == list(range(ITERATIONS + 2))
    assert all(proof["on_policy"] and proof["max_logprob_gap"] < 1e-3 for proof in proofs)


def test_a_directory_with_records_is_refused_unless_the_run_resumes(uninterrupted: Run, tmp_path: Path) -> None:
    run = uninterrupted.copied_to(tmp_path / "run")
    run.start(*SETTINGS)
    assert run.finish() != 0
    assert "holds the records of another run" in run.everything_said()
    run.start(*SETTINGS, "--run.resume", "true", "--run.seed", "6")
    assert run.finish() != 0
    assert "run.seed is 6, but was 5" in run.everything_said()
    shutil.rmtree(run.dir / "checkpoints")
    run.start(*SETTINGS, "--train.iterations", "2", "--run.resume", "true")
    assert run.finish() == 0, run.everything_said()
    assert [record["iteration"] for record in run.lines("metrics.jsonl")] == [0, 1]


def test_the_newest_two_checkpoints_are_left_of_a_run_and_no_process(uninterrupted: Run) -> None:
    names = sorted(path.name for path in (uninterrupted.dir / "checkpoints").iterdir())
    assert names == [f"iteration-{number:06}" for number in (ITERATIONS - 1, ITERATIONS)]
    assert not [p for p in psutil.process_iter() if str(uninterrupted.dir) in " ".join(command_of(p))]
