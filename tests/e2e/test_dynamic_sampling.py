"""Runs with a reserve of prompts on real parts: whatever happens to them, the same groups are trained."""

from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM

from tests.support.local_run import End, Run
from tests.support.same_run import assert_same_run
from tests.support.selected import require_selected, selections

# The first test of each run waits for all of it.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

SETTINGS = (
    *("--train.iterations=5", "--train.order=prompt", "--prompts.reserve=5"),
    *("--checkpoint.every=1", "--inference.num_instances=2", "--algorithm.kl_coef=0.05"),
)
DIVIDED = (
    *("--trainer.tensor_parallel=2", "--trainer.micro_batch_tokens=100"),
    "--cluster.max_restarts=0",
)
"""One leader of two ranks, and nothing that is lost comes back."""

# So small a step changes no sample: those of all runs can be compared in each iteration.
ALIKE = (*SETTINGS, "--train.iterations=3", "--optimizer.learning_rate=1e-9", "--trainer.num_processes=2")


@pytest.fixture(scope="module")
def make_run(new_run: Callable[..., Run]) -> Callable[[str], Run]:
    def make(name: str) -> Run:
        run = new_run(name)
        run.config.write_text(run.config.read_text().replace(":vowels", ":uneven"))
        return run

    return make


@pytest.fixture(scope="module")
def undisturbed(make_run: Callable[[str], Run]) -> Run:
    return make_run("undisturbed").train(*SETTINGS, *DIVIDED)


@pytest.fixture(scope="module")
def disturbed(make_run: Callable[[str], Run]) -> tuple[Run, End]:
    """It lost an instance, and then its reward failed; it was resumed when that was mended."""
    run = make_run("disturbed")
    run.start(*SETTINGS, *DIVIDED)
    run.wait_for_iterations(1)
    run.instances()[0].kill()
    run.wait_until(lambda: run.lines("metrics.jsonl")[-1]["num_instances"] == 1)
    run.hold()
    end = run.end_by(lambda: run.tell("raise"))
    run.tell("")
    return run.train(*SETTINGS, *DIVIDED, "--run.resume=true"), end


def test_prompts_with_equal_rewards_are_left_out(undisturbed: Run) -> None:
    require_selected(undisturbed)


def test_the_whole_loop_runs_on_a_divided_model(undisturbed: Run) -> None:
    assert all(record["max_logprob_gap"] < 1e-3 for record in undisturbed.lines("metrics.jsonl"))
    assert AutoModelForCausalLM.from_pretrained(undisturbed.dir / "model") is not None


@pytest.mark.nightly
def test_a_reward_that_raises_ends_both_ranks_and_names_prompt_and_reward(disturbed: tuple[Run, End]) -> None:
    """The rank without rollouts learns of it, too, and does not wait for ever."""
    _, end = disturbed
    assert end.code != 0 and not end.left_processes
    assert all(part in end.output for part in ("RewardError", "uneven", "prompt", "no such column")), end.output
    assert end.checkpoints[-1].name == f"iteration-{end.num_trained:06}", "no further step was taken"


def test_a_run_that_lost_an_instance_and_was_resumed_trains_what_an_undisturbed_one_does(
    disturbed: tuple[Run, End], undisturbed: Run
) -> None:
    run, end = disturbed
    assert 1 <= end.num_trained < 5
    assert_same_run(run, undisturbed)
    assert selections(run) == selections(undisturbed)


@pytest.mark.nightly
def test_every_order_and_mode_selects_the_same_groups(make_run: Callable[[str], Run]) -> None:
    """By two leaders, each of which selects from its share; one of them is killed."""
    synchronous, completion = make_run("synchronous"), make_run("completion")
    synchronous.train(*ALIKE, "--train.mode=synchronous", "--algorithm.name=reinforce_pp_baseline")
    completion.start(*ALIKE, "--train.order=completion")
    completion.wait_for_iterations(1)
    completion.ranks()[-1].kill()
    assert completion.finish() == 0, completion.everything_said()
    assert completion.restarts()["trainer"] == 1
    for run in (synchronous, completion):
        require_selected(run)
    assert selections(completion) == selections(synchronous)
