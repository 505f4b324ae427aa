"""Simulated iterations against what can be computed by hand."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from deploy.scaling.simulation import SCHEDULES, Costs, SetUp, Shape, finish_times, simulate, train
from tests.support.fresh_seed import fresh_seed
from tests.support.walked_iteration import walked

COSTS = Costs(
    step_s=0.01,
    token_s=0.001,
    prompt_token_s=0.002,
    score_s=0.5,
    window_s=0.1,
    row_s=0.003,
    optimizer_s=2.0,
    publish_s=1.0,
    between_s=0.25,
)

NOTHING = Costs(*(0.0,) * 9)


def drawn(rng: random.Random, number: int) -> list[Shape]:
    return [
        Shape(rng.randint(1, 90), tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 6)))) for _ in range(number)
    ]


def test_a_response_alone_takes_its_prompt_and_a_step_for_each_token() -> None:
    (finished,) = finish_times([Shape(10, (7,))], COSTS, SetUp())
    assert finished == pytest.approx(10 * 0.002 + 7 * 0.011 + 0.5)


def test_responses_that_run_together_make_steps_longer_until_each_ends() -> None:
    (finished,) = finish_times([Shape(0, (2, 5))], COSTS, SetUp())
    assert finished == pytest.approx(2 * 0.012 + 3 * 0.011 + 0.5)


def test_what_does_not_run_at_once_waits_for_an_end() -> None:
    groups = [Shape(0, (4,)), Shape(0, (2,)), Shape(0, (3,))]
    assert finish_times(groups, COSTS, SetUp(max_running=1)) == pytest.approx(
        [0.5 + 4 * 0.011, 0.5 + 6 * 0.011, 0.5 + 9 * 0.011]
    )


def test_groups_go_to_the_instance_with_the_fewest_expected_tokens() -> None:
    groups = [Shape(0, (9,), expected=1.8), Shape(0, (2,), expected=0.4), Shape(0, (4,), expected=0.8)]
    found = finish_times(groups, COSTS, SetUp(num_instances=2))
    # The third joins the second.
    assert found == pytest.approx([0.5 + 9 * 0.011, 0.5 + 2 * 0.012, 0.5 + 2 * 0.012 + 2 * 0.011])
    # Of which nothing is known, the third goes in turn to the first.
    found = finish_times([replace(group, expected=1.0) for group in groups], COSTS, SetUp(num_instances=2))
    assert found == pytest.approx([0.5 + 4 * 0.012 + 5 * 0.011, 0.5 + 2 * 0.011, 0.5 + 4 * 0.012])


def test_the_longest_expected_group_is_first_and_an_instance_that_is_done_takes_the_next() -> None:
    groups = [Shape(0, (1,), expected=0.5), Shape(0, (1,), expected=0.5), Shape(0, (4,), expected=2.0)]
    set_up = SetUp(num_instances=2, max_running=1)
    assert finish_times(groups, COSTS, set_up) == pytest.approx([0.511, 0.522, 0.544])
    # Without, the third waits for the first, as their indices have it.
    assert finish_times(groups, COSTS, replace(set_up, has_tail=False)) == pytest.approx([0.511, 0.511, 0.555])


@pytest.mark.parametrize(("is_known", "least", "most"), [(True, 1.2, 1.4), (False, 1.0, 1.05)])
def test_tail_scheduling_saves_most_where_lengths_are_known_before(is_known: bool, least: float, most: float) -> None:
    """64 prompts of 8 log-normal responses at four instances of 32 at once."""
    costs, ratios = replace(NOTHING, step_s=0.01, token_s=0.0001), []
    for seed in range(10):
        rng = random.Random(seed)
        means = [400 * rng.lognormvariate(0, 0.7) for _ in range(64)]
        lengths = [tuple(max(1, min(4096, int(mean * rng.lognormvariate(0, 0.7)))) for _ in range(8)) for mean in means]
        usual = fmean(fmean(group) for group in lengths)
        groups = [Shape(64, group, True, fmean(group) / usual if is_known else 1.0) for group in lengths]
        ends = [max(finish_times(groups, costs, SetUp(4, 1, 32, has_tail=has_tail))) for has_tail in (False, True)]
        ratios.append(ends[0] / ends[1])
    assert least < fmean(ratios) < most


@pytest.mark.parametrize("max_running", [1, 3, 1000])
def test_without_tail_scheduling_each_instance_has_its_own_groups(max_running: int) -> None:
    rng = random.Random(fresh_seed())
    for _ in range(20):
        groups, number = drawn(rng, rng.randint(1, 40)), rng.randint(1, 7)
        found = finish_times(groups, COSTS, SetUp(number, max_running=max_running, has_tail=False))
        for place in range(min(number, len(groups))):
            own = finish_times(groups[place::number], COSTS, SetUp(max_running=max_running))
            assert found[place::number] == pytest.approx(own)


def test_without_a_dock_each_replica_has_its_own_groups() -> None:
    rng = random.Random(fresh_seed())
    for _ in range(50):
        arrivals = [(rng.uniform(0, 3), rng.randint(1, 200)) for _ in range(rng.randint(1, 40))]
        number, rows = rng.randint(1, 7), rng.randint(1, 400)
        end_s, busy_s, _ = train(arrivals, COSTS, SetUp(1, number, window_rows=rows, has_dock=False))
        own = [train(arrivals[i::number], COSTS, SetUp(window_rows=rows)) for i in range(min(number, len(arrivals)))]
        assert end_s == pytest.approx(max(end for end, _, _ in own))
        assert busy_s == pytest.approx(max(busy for _, busy, _ in own))
    # Both waited for by replica 0, while 1 has nothing.
    uneven = [(0.0, 100), (9.0, 1), (0.0, 100)]
    assert train(uneven, COSTS, SetUp(1, 2, 1, 100))[0] == pytest.approx(9.0 + 0.1 + 0.003)
    assert train(uneven, COSTS, SetUp(1, 2, 1, 100, has_dock=False))[1] == pytest.approx(2 * (0.1 + 0.3))
    assert train(uneven, COSTS, SetUp(1, 2, 1, 100))[1] == pytest.approx(0.1 + 0.3 + 0.1 + 0.003)


@pytest.mark.parametrize("number", [2, 4])
def test_the_dock_saves_what_it_does_between_real_processes(number: int) -> None:
    """As `benchmarks/dock.py` has it: there 2% with two replicas, 8% with four, of means of three batches."""
    rng, ratios = random.Random(0), []
    for _ in range(20):
        groups = [
            [max(1, min(800, round(100 * rng.lognormvariate(0, 1)))) for _ in range(8)] for _ in range(32 * number)
        ]
        all_s = max(map(max, groups)) / 400
        costs = replace(NOTHING, row_s=all_s * number / sum(64 + sum(group) for group in groups))
        arrivals = [(max(group) / 400, 64 + sum(group)) for group in groups]
        dock, fixed = (train(arrivals, costs, SetUp(1, number, has_dock=has_dock))[0] for has_dock in (True, False))
        ratios.append(dock / fixed)
    assert 0.9 < fmean(ratios) < 0.98


def test_after_the_rollouts_the_dock_gives_parts_of_equally_many_rows() -> None:
    rows = [100, 90, 60, 50, 40, 20]
    set_up = SetUp(1, 2, window_rows=1000, schedule="synchronous")
    # 100, 50 and 40 rows, or 90, 60 and 20; a window each.
    assert train([(0.0, each) for each in rows], COSTS, set_up)[0] == pytest.approx(0.1 + 0.003 * 190)
    # And those at even indices.
    assert train([(0.0, each) for each in rows], COSTS, replace(set_up, has_dock=False))[0] == pytest.approx(0.1 + 0.6)


@pytest.mark.parametrize("has_dock", [True, False])
def test_replicas_without_a_dock_slow_rollouts_down_only_while_they_train(has_dock: bool) -> None:
    costs = replace(NOTHING, window_s=1.0, slower_decoding=2.0)
    end_s, busy_s, rollout_s = train([(0.0, 1), (0.0, 1), (0.0, 1)], costs, SetUp(1, 2, 1, 1, has_dock=has_dock), 9.0)
    # Half as fast while both train, for a second; two thirds as fast while one does.
    assert (end_s, busy_s, rollout_s) == pytest.approx((2.0, 2.0, 9.0 + 1 / 2 + 1 / 3))


def test_a_publish_takes_longer_by_the_same_for_each_further_instance() -> None:
    costs = replace(COSTS, passing_s=0.125)
    for number in (1, 2, 50):
        found = [simulate([Shape(1, (3,))], each, SetUp(number)).seconds for each in (COSTS, costs)]
        assert found[1] - found[0] == pytest.approx((number - 1) * 0.125)


def test_a_replica_trains_what_waits_in_one_window_and_waits_where_nothing_does() -> None:
    end_s, busy_s, _ = train([(1.0, 100), (1.1, 100), (1.2, 100), (9.0, 100)], COSTS, SetUp())
    # The first window ends at 1.4, the second has two groups.
    assert busy_s == pytest.approx(3 * 0.1 + 400 * 0.003)
    assert end_s == pytest.approx(9.0 + 0.1 + 0.3)


def test_a_window_has_at_most_its_rows_unless_one_group_has_more() -> None:
    assert train([(0.0, 60)] * 4, COSTS, SetUp(window_rows=100))[1] == pytest.approx(4 * 0.1 + 240 * 0.003)
    assert train([(0.0, 60)] * 4, COSTS, SetUp(window_rows=120))[1] == pytest.approx(2 * 0.1 + 240 * 0.003)
    assert train([(0.0, 500)], COSTS, SetUp(window_rows=120))[1] == pytest.approx(0.1 + 500 * 0.003)


def test_replicas_share_what_waits() -> None:
    end_s, busy_s, _ = train([(0.0, 50)] * 8, COSTS, SetUp(num_replicas=4))
    assert end_s == busy_s == pytest.approx(0.1 + 100 * 0.003)


@pytest.mark.parametrize("seed", range(20))
def test_an_iteration_is_between_its_bounds_and_orders_the_schedules(seed: int) -> None:
    rng = random.Random(seed)
    groups = drawn(rng, rng.randint(1, 40))
    sizes = {"num_instances": rng.randint(1, 5), "num_replicas": rng.randint(1, 4), "max_running": rng.randint(1, 64)}
    found = {schedule: simulate(groups, COSTS, SetUp(**sizes, schedule=schedule)) for schedule in SCHEDULES}
    periodic, synchronous, behind = found.values()
    fixed_s = 2.0 + 1.0 + 0.25
    rollouts = [each.rollout_s for each in found.values()]
    assert rollouts == pytest.approx([max(finish_times(groups, COSTS, SetUp(**sizes)))] * 3)
    assert synchronous.seconds == pytest.approx(fixed_s + synchronous.rollout_s + synchronous.train_s)
    assert behind.seconds == pytest.approx(1.25 + max(behind.rollout_s, behind.train_s + 2.0))
    # The last window follows the last group.
    assert fixed_s + periodic.rollout_s + 0.1 <= periodic.seconds
    assert periodic.seconds <= fixed_s + periodic.rollout_s + len(groups) * 0.1 + synchronous.train_s
    for each in found.values():
        assert each.wait_s >= 0 and 0 <= each.idle_training < 1 and 0 <= each.idle_inference < 1
        assert each.num_response_tokens == sum(sum(group.response_tokens) for group in groups)
        assert each.tokens_per_s == pytest.approx(each.num_response_tokens / each.seconds)


def test_a_group_that_is_left_out_is_sampled_and_not_trained() -> None:
    left_out = Shape(5, (30, 30), is_trained=False)
    kept = [Shape(5, (3, 4)), Shape(5, (2, 6))]
    with_it, without = (simulate(groups, COSTS, SetUp(schedule="synchronous")) for groups in ([*kept, left_out], kept))
    assert with_it.rollout_s > without.rollout_s and with_it.train_s == without.train_s
    assert with_it.num_response_tokens == without.num_response_tokens == 15


def test_twice_the_instances_never_take_longer_where_a_step_costs_its_tokens_alone() -> None:
    rng = random.Random(0)
    costs = Costs(0.0, 0.001, 0.0, 0.0, 0.1, 0.003, 0.0, 0.0)
    for _ in range(20):
        groups = [Shape(1, (rng.randint(1, 60),) * 4) for _ in range(rng.randint(1, 30))]
        one, two, many = (simulate(groups, costs, SetUp(number)).rollout_s for number in (1, 2, 1000))
        assert one == pytest.approx(sum(4 * group.response_tokens[0] for group in groups) * 0.001)
        assert one / 2 - 1e-9 <= two <= one and many == pytest.approx(
            max(4 * g.response_tokens[0] for g in groups) * 0.001
        )


def test_pools_that_share_processors_slow_each_other_down_while_both_work() -> None:
    """Rollouts that take 3 s alone; the first group ends after 1 s, its window takes 1 s alone."""
    costs = replace(NOTHING, window_s=1.0, slower_decoding=2.0, slower_training=1.5)
    end_s, busy_s, rollout_s = train([(1.0, 1), (3.0, 1)], costs, SetUp(window_rows=1), 3.0)
    # From 1 s to 2.5 s both work, the rollouts half as fast; then 1.25 s of them are left.
    assert (rollout_s, busy_s, end_s) == pytest.approx((3.75, 2.5, 4.75))
    # Of two replicas one works: half of the factor beyond 1.
    end_s, busy_s, rollout_s = train([(1.0, 1), (3.0, 1)], costs, SetUp(1, 2, window_rows=1), 3.0)
    assert (rollout_s, busy_s, end_s) == pytest.approx((2.5 + 1.0, 2.5, 4.5))
    # A window that goes on after the rollouts is slower until then.
    assert train([(1.0, 1)], costs, SetUp(), 1.5)[::2] == pytest.approx((1 + 1.0 + 1 - 1 / 1.5, 2.0))


@pytest.mark.parametrize("seed", range(10))
def test_an_iteration_of_pools_that_share_processors_is_what_small_steps_of_time_give(seed: int) -> None:
    rng = random.Random(seed)
    groups = drawn(rng, rng.randint(2, 20))
    costs = replace(COSTS, slower_decoding=rng.uniform(1, 2), slower_training=rng.uniform(1, 2))
    finished, windows = walked(groups, costs, set_up := SetUp(rng.randint(1, 3), window_rows=1))
    found = simulate(groups, costs, set_up)
    assert found.rollout_s == pytest.approx(max(finished), abs=0.02)
    assert found.seconds == pytest.approx(3.25 + windows[-1][2], abs=0.02 * len(groups))
