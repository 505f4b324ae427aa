import itertools
from statistics import fmean

import pytest

from async_rl.evaluation.evaluator import ScoredPrompt, figures_of, intervals_of
from async_rl.evaluation.intervals import mean_interval, share_interval
from async_rl.method.types import Scores
from async_rl.records.pass_at_k import ks_of, pass_at_k
from async_rl.rollouts.groups.trajectory import Trajectory
from tests.support.groups import make_response


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_solved_one(num_samples: int) -> None:
    for num_solved, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        solved = [i < num_solved for i in range(num_samples)]
        share = fmean(any(chosen) for chosen in itertools.combinations(solved, k))
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)
    assert pass_at_k(1024, 1023, 1) == pytest.approx(1023 / 1024)
    assert pass_at_k(1024, 513, 512) == 1.0


def test_k_goes_up_in_powers_of_two_to_the_number_of_samples() -> None:
    assert ks_of(1) == [1]
    assert ks_of(6) == [1, 2, 4, 6]
    assert ks_of(8) == [1, 2, 4, 8]


def test_figures_are_means_over_prompts_and_responses() -> None:
    responses = make_response((1, 2, 3)), make_response((1,), finish_reason="length")
    rollouts = list(map(Trajectory.single_turn, responses))
    scored = [ScoredPrompt.of(rollouts, Scores((1.0, 0.25))), ScoredPrompt.of(rollouts, Scores((0.0, 0.5)))]
    means = {"reward_mean": 0.4375, "response_tokens_mean": 2.0, "truncated_share": 0.5}
    assert figures_of(scored, 1.0) == {"avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5} | means
    assert figures_of(scored, 0.5) == {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0} | means
    assert figures_of(scored, None) == means, "a reward that does not say what is correct"


def test_intervals_are_those_of_what_each_prompt_has() -> None:
    scored = [ScoredPrompt((1.0, 0.0, 0.0, 0.0), 4, 0), ScoredPrompt((1.0, 1.0, 1.0, 0.0), 4, 0)]
    intervals = intervals_of(scored, 1.0)
    assert intervals.keys() == {"avg@4", "pass@1", "pass@2", "pass@4", "reward_mean"}
    assert intervals["avg@4"] == intervals["pass@1"] == share_interval([0.25, 0.75], 8)
    assert intervals["pass@2"] == share_interval([0.5, 1.0], 4)
    assert intervals["pass@4"] == share_interval([1.0, 1.0], 2)
    assert intervals["reward_mean"] == mean_interval([0.25, 0.75])
    assert intervals_of(scored, None).keys() == {"reward_mean"}
    assert intervals_of(scored[:1] * 2, None) == {}, "equal rewards say nothing about others"


def test_pass_at_k_is_over_the_prompts_whose_part_says_what_is_correct() -> None:
    scored = [
        ScoredPrompt((0.2, 1.2), 4, 0, (("math", (0.0, 1.0)), ("format", (1.0, 1.0)))),
        ScoredPrompt((3.0, 5.0), 4, 0, (("judge", (3.0, 5.0)),)),
    ]
    figures = figures_of(scored, {"math": 1.0})
    assert (figures["pass@1"], figures["pass@2"]) == (0.5, 1.0)
    assert (figures["reward/math"], figures["reward/format"], figures["reward/judge"]) == (0.5, 1.0, 4.0)
    assert "pass@1" not in figures_of(scored[1:], {"math": 1.0})
    assert figures_of(scored, 1.0)["pass@1"] == 0.75, "of the total"
