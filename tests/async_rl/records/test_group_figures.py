"""Figures of made-up groups, computed by hand."""

from itertools import combinations, pairwise

import pytest

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.records.group_figures import group_figures, histogram, length_figures


def row(index: int, rewards: tuple[float, ...], lengths: tuple[int, ...], num_truncated: int = 0) -> GroupProof:
    return GroupProof(
        index=index,
        prompt_id=f"row-{index}",
        num_responses=len(rewards),
        num_prompt_tokens=3,
        num_response_tokens=sum(lengths),
        versions=("v",),
        rewards=rewards,
        attempts=1,
        gaps=(("http://a", LogprobGaps(sum(lengths))),),
        num_turns=len(rewards),
        num_truncated=num_truncated,
        rollout_lengths=lengths,
    )


def test_pass_at_k_is_the_share_of_draws_with_a_correct_rollout() -> None:
    groups = [row(0, (1.0, 0.0, 0.0, 0.0), (1, 1, 1, 1)), row(1, (1.0, 1.0, 0.0, 0.0), (1, 1, 1, 1))]
    figures = group_figures(groups, correct_at=1.0)
    for k in (2, 4):
        draws = [[max(draw) for draw in combinations(group.rewards, k)] for group in groups]
        assert figures[f"pass@{k}"] == pytest.approx(sum(sum(each) / len(each) for each in draws) / 2)
    assert figures["accuracy"] == 3 / 8 and "pass@1" not in figures and "pass@3" not in figures


def test_a_reward_that_does_not_say_what_is_correct_has_neither_accuracy_nor_pass_at_k() -> None:
    assert not [
        name for name in group_figures([row(0, (1.0, 0.0), (1, 1))], None) if "pass@" in name or "accur" in name
    ]


def test_groups_of_equal_rewards_have_no_signal() -> None:
    groups = [row(0, (1.0, 1.0), (1, 1)), row(1, (0.0, 0.0), (1, 1)), row(2, (0.0, 1.0), (1, 1))]
    assert group_figures(groups, None)["num_groups_without_signal"] == 2


def test_lengths_are_over_rollouts_of_all_groups() -> None:
    figures = group_figures([row(0, (1.0, 0.0), (2, 100), 1), row(1, (1.0, 0.0), (4, 6))], None)
    assert [figures[f"response_tokens_{name}"] for name in ("min", "p50", "p90", "max", "mean")] == [2, 4, 100, 100, 28]
    assert figures["truncated_share"] == 0.25 and figures["response_tokens"] == 112


def test_quantiles_of_a_known_sequence() -> None:
    figures = length_figures(range(1, 101))
    assert [figures[f"response_tokens_{name}"] for name in ("min", "p50", "p90", "max")] == [1, 50, 90, 100]
    assert length_figures([7])["response_tokens_p90"] == 7


def test_a_histogram_counts_every_length_once_in_adjoining_buckets() -> None:
    lengths = [0, 1, 1, 2, 3, 5, 8, 100, 100_000, 2**31]
    buckets = histogram(lengths)
    assert sum(count for _, _, count in buckets) == len(lengths)
    assert all(left[1] == right[0] for left, right in pairwise(buckets))
    for lower, upper, count in buckets:
        assert count == sum(lower <= length < upper for length in lengths)
    assert buckets[0][:2] == [0, 1] and buckets[-1][0] <= 2**31 < buckets[-1][1]
    assert histogram([5]) == [[4, 6, 1]]
