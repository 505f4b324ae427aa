"""Runs whose rollouts are those of a program with several turns, tools and branches, on real parts."""

from collections.abc import Callable

import pytest

from tests.support.chat_tokenizer import make_chat_model
from tests.support.local_run import Run
from tests.support.rollout_program import use_program
from tests.support.selected import require_selected
from tests.support.tiers import at_night

# The first test waits for the run.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

EVALUATION = """
[evaluation]
every = 1
[[evaluation.sets]]
name = "held-out"
source = "{source}"
num_samples = 2
max_prompts = 3
temperature = 0.7
"""

NUM_ITERATIONS = 2
NUM_DRAWN = 11
"""Six prompts, and a reserve of five."""
SETTINGS = (
    *("--inference.num_instances=2", f"--train.iterations={NUM_ITERATIONS}", "--train.order=prompt"),
    *("--prompts.reserve=5", "--algorithm.kl_coef=0.05"),
    # So small a step changes no sample: those of both layouts can be compared in each iteration.
    "--optimizer.learning_rate=1e-9",
)


@pytest.fixture(scope="module")
def make_run(new_run: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    shared = tmp_path_factory.mktemp("programs")
    model = make_chat_model(shared / "chat")

    def make(name: str) -> Run:
        run = new_run(name)
        use_program(run, model, shared)
        with run.config.open("a") as config:
            config.write(EVALUATION.format(source=run.config.with_name("rows.jsonl")))
        return run

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[[str], Run]) -> Run:
    return make_run("run").train(*SETTINGS)


@pytest.fixture(scope="module")
def divided(make_run: Callable[[str], Run]) -> Run:
    return make_run("divided").train(*SETTINGS, "--trainer.num_processes=2")


LEADERS = pytest.mark.parametrize(("name", "num_leaders"), [("divided", 2), at_night("run", 1)])


@LEADERS
def test_programs_are_proven_token_by_token(name: str, num_leaders: int, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(name)
    require_selected(run)
    assert len(run.lines("ledger.jsonl")) == NUM_ITERATIONS
    assert all(record["max_logprob_gap"] < 1e-4 for record in run.lines("metrics.jsonl"))


@LEADERS
def test_of_each_leaders_share_the_first_rollouts_with_a_signal_are_selected_in_whatever_order_they_finish(
    name: str, num_leaders: int, request: pytest.FixtureRequest
) -> None:
    rows = request.getfixturevalue(name).lines("timeline.jsonl")
    for iteration in range(NUM_ITERATIONS):
        for leader in range(num_leaders):
            of_leader = [row for row in rows if row["iteration"] == iteration and row["index"] % num_leaders == leader]
            share = sorted(of_leader, key=lambda row: row["index"])
            # All that come before the last one are there: trained, or left out because they have no signal.
            assert [row["index"] for row in share] == [leader + num_leaders * i for i in range(len(share))]
            trained = [row for row in share if row.get("is_trained", True)]
            assert len(trained) == 6 // num_leaders
            is_whole = len(share) == len(range(leader, NUM_DRAWN, num_leaders))
            assert is_whole or all(int(row["prompt_id"]) % 3 for row in trained)


@pytest.mark.nightly
def test_rollouts_do_not_depend_on_the_number_of_leaders(run: Run, divided: Run) -> None:
    keys = ("prompt_id", "samples", "reward_mean", "num_turns", "num_branches", "num_response_tokens")
    of_one, of_two = (
        {(row["iteration"], row["index"]): [row.get(key) for key in keys] for row in each.lines("timeline.jsonl")}
        for each in (run, divided)
    )
    in_both = of_one.keys() & of_two.keys()
    assert len(in_both) > 4 * NUM_ITERATIONS
    assert {place: of_one[place] for place in in_both} == {place: of_two[place] for place in in_both}


@LEADERS
def test_turns_and_branches_of_rollouts_are_recorded(
    name: str, num_leaders: int, request: pytest.FixtureRequest
) -> None:
    """Of all replicas."""
    rollouts = request.getfixturevalue(name).lines("rollouts.jsonl")
    assert [each["iteration"] for each in rollouts] == list(range(NUM_ITERATIONS))
    # Those in reserve that are not needed are not waited for.
    assert all(4 * 6 <= each["num_rollouts"] <= 4 * NUM_DRAWN for each in rollouts)
    assert all(each["turns_max"] == 4 and each["branches_mean"] for each in rollouts)


@pytest.mark.nightly
def test_evaluations_of_programs_have_the_same_samples(run: Run, divided: Run) -> None:
    evaluations = [row for each in (run, divided) for row in each.lines("evaluations.jsonl")]
    assert all(row["complete"] for row in evaluations)
    figures = ("num_prompts", "num_samples", "reward_mean", "response_tokens_mean", "truncated_share")
    assert len({tuple(row[key] for key in figures) for row in evaluations}) == 1, evaluations
