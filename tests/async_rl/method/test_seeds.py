"""Where runs draw from: values that runs of before have used, and room between them."""

import itertools

import pytest

from async_rl.method.seeds import evaluation_rows_seed, evaluation_seed, group_seed, prompt_order


@pytest.mark.parametrize(
    ("use", "seed"),
    [
        ((0, 0, 0), 4926672500456791040),
        ((1, 2, 3), 6089036382027501568),
        ((2**31 - 1, 10**6, 511), 4301411032973324288),
    ],
)
def test_groups_are_sampled_with_the_seeds_they_always_had(use: tuple[int, int, int], seed: int) -> None:
    assert group_seed(*use) == seed


def test_evaluations_draw_what_they_always_drew() -> None:
    assert evaluation_seed(0, "words", "0") == 4455009482725935104
    assert evaluation_seed(7, "aime-24", "row12") == 4836435401892608000
    assert [evaluation_rows_seed(seed) for seed in (0, 1, 12345)] == [724067001, 667302641, 1195492372]


def test_epochs_have_the_order_they_always_had() -> None:
    assert list(prompt_order(0, 0, num_rows=6)) == [4, 2, 1, 3, 0, 5]
    assert list(prompt_order(0, 1, num_rows=6)) == [5, 4, 1, 3, 0, 2]
    assert list(prompt_order(3, 2, num_rows=9)) == [7, 5, 8, 4, 0, 6, 1, 2, 3]


def test_sampling_seeds_leave_room_for_the_responses_of_a_request() -> None:
    groups = [group_seed(seed, t, i) for seed in range(2) for t in range(50) for i in range(50)]
    evaluations = [evaluation_seed(seed, name, str(i)) for seed in range(2) for name in "ab" for i in range(50)]
    seeds = sorted(groups + evaluations)
    assert all(0 <= a < b < 2**63 and b - a >= 1024 for a, b in itertools.pairwise(seeds))
