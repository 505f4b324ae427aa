"""The whole system on real parts where an algorithm, a mode or a model needs ranks or steps of its own."""

import random
import time
from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM

from tests.support.local_run import End, Run
from tests.support.same_run import SETTINGS, assert_same_run

# The first test of each run waits for all of it.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

STEPS = 3
WITH_A_CRITIC = (
    *(*SETTINGS, "--train.iterations=5", f"--train.steps_per_batch={STEPS}", "--algorithm.old_policy=model"),
    *(
        "--algorithm.name=ppo",
        "--algorithm.options.critic_learning_rate=1e-3",
        "--algorithm.options.critic_iterations_alone=2",
    ),
    *("--trainer.pipeline_parallel=2", "--trainer.micro_batch_tokens=100"),
)


@pytest.fixture(scope="module")
def undisturbed(new_run: Callable[..., Run]) -> Run:
    return new_run("undisturbed").train(*WITH_A_CRITIC)


@pytest.fixture(scope="module")
def starved(new_run: Callable[..., Run]) -> tuple[Run, End]:
    """It lost its only instance while its critic learned alone; then it was resumed, and lost all its ranks."""
    run = new_run("starved")
    run.start(*WITH_A_CRITIC, "--pool.timeout_s=3", "--cluster.max_restarts=0")
    run.wait_for_iterations(1)
    end = run.end_by(run.instances()[0].kill, timeout_s=30)
    run.start(*WITH_A_CRITIC, "--run.resume=true")
    run.wait_for_iterations(max(3, end.num_trained + 1))
    time.sleep(random.uniform(0, 0.3))  # Between two steps of a batch, or wherever it is then.
    run.kill_trainer()
    assert run.finish() == 0, run.everything_said()
    return run, end


def test_a_critic_and_several_steps_per_batch_run_in_a_pipeline(undisturbed: Run) -> None:
    proofs = undisturbed.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [i for i in range(5) for _ in range(STEPS)]
    assert all(proof["on_policy"] and proof["num_groups"] == 6 // STEPS for proof in proofs)
    records = undisturbed.lines("metrics.jsonl")
    assert all(record["max_logprob_gap"] < 1e-3 for record in records)
    assert [record["learning_rate"] > 0 for record in records] == [False, False, True, True, True]
    assert AutoModelForCausalLM.from_pretrained(undisturbed.dir / "model") is not None


@pytest.mark.nightly
def test_a_run_without_instances_left_ends_in_a_named_error_in_time(starved: tuple[Run, End]) -> None:
    _, end = starved
    assert end.code != 0 and not end.left_processes
    assert "NoInstanceLeft" in end.output or "PublishError" in end.output, end.output


@pytest.mark.nightly
def test_a_killed_run_with_a_critic_goes_on_as_if_it_had_not_been(starved: tuple[Run, End], undisturbed: Run) -> None:
    run, end = starved
    assert 1 <= end.num_trained < 5 and run.restarts()["trainer"] == 1
    assert_same_run(run, undisturbed)
    of_critic_too = ("value_loss", "value", "explained_variance", "critic_grad_norm")
    records, expected = (
        [[r[key] for key in of_critic_too] for r in run.lines("metrics.jsonl")] for run in (run, undisturbed)
    )
    assert records == expected


def test_in_exact_mode_every_log_prob_is_that_of_the_rollout(
    new_run: Callable[..., Run], reproducible_products: None
) -> None:
    run = new_run("exact").train("--train.exact=true")
    assert_proven(run)
    assert [record["max_logprob_gap"] for record in run.lines("metrics.jsonl")] == [0.0, 0.0, 0.0]


def test_experts_on_two_ranks_are_published_and_proven(new_run: Callable[..., Run]) -> None:
    run = new_run("experts", "qwen3_moe").train("--trainer.expert_parallel=2", "--trainer.num_processes=2")
    assert_proven(run)
    assert AutoModelForCausalLM.from_pretrained(run.dir / "model").config.model_type == "qwen3_moe"


def assert_proven(run: Run) -> None:
    proofs = run.lines("ledger.jsonl")
    assert [proof["iteration"] for proof in proofs] == [0, 1, 2]
    assert all(proof["on_policy"] and proof["num_groups"] == 6 and proof["num_responses"] == 24 for proof in proofs)
    assert len({proof["weight_version"] for proof in proofs}) == 3
    assert len({proof["fingerprint"] for proof in proofs}) == 3, "every step changes the weights"
