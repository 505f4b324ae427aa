from dataclasses import replace

import pytest

from async_rl.records.balance import (
    MAX_AGE,
    NUM_RECENT,
    IterationTimes,
    advise,
    desired_instances,
    overlap_bound_s,
    overlap_efficiency,
    remember,
)


def times(
    rollout_s: float,
    train_s: float,
    num_instances: int = 1,
    num_groups: int = 32,
    overhead_s: float = 0.0,
    response_tokens: int = 1000,
) -> IterationTimes:
    """An iteration in which rollouts and training overlap perfectly."""
    period_s = max(rollout_s, train_s)
    return IterationTimes(
        seconds=period_s + overhead_s,
        wait_s=max(0.0, rollout_s - train_s),
        train_s=train_s,
        rollout_s=rollout_s,
        num_instances=num_instances,
        num_groups=num_groups,
        response_tokens=response_tokens,
    )


@pytest.mark.parametrize(
    ("rollout_s", "train_s", "num_instances", "desired"),
    [
        (10.0, 10.0, 1, 1),  # balanced
        (20.0, 10.0, 1, 2),
        (20.0, 10.0, 3, 6),
        (15.0, 10.0, 1, 2),  # one would leave the trainer waiting for a third of the time
        (10.5, 10.0, 2, 2),  # 2.1: a tenth is not worth an instance
        (5.0, 10.0, 4, 2),
        (5.0, 10.0, 1, 1),
        (0.001, 10.0, 8, 1),  # never none
        (0.0, 10.0, 2, 1),  # nothing was sampled on this rank
        (10.0, 0.001, 1, 32),  # at most one per group
        (10.0, 0.0, 1, 32),
        (0.0, 0.0, 2, 32),
        (1e9, 1e-9, 1, 32),
    ],
)
def test_as_many_instances_are_desired_as_make_rollouts_take_as_long_as_training(
    rollout_s: float, train_s: float, num_instances: int, desired: int
) -> None:
    assert desired_instances([times(rollout_s, train_s, num_instances)]) == desired


def test_the_desired_number_balances_the_iteration_it_predicts() -> None:
    before = times(rollout_s=48.0, train_s=10.0, num_instances=2)
    desired = desired_instances([before])
    after = times(48.0 * 2 / desired, 10.0, desired)
    assert before.idle_training > 0.75 and after.idle_training == 0.0
    assert desired_instances([after]) == desired, "advice that is taken stays"


def test_what_was_desired_does_not_depend_on_how_many_took_part() -> None:
    assert {desired_instances([times(24.0 / n, 6.0, n)]) for n in (1, 2, 3, 4, 6)} == {4}


def test_one_odd_iteration_does_not_change_the_advice() -> None:
    usual = [times(20.0, 10.0)] * 4
    assert desired_instances([*usual, times(500.0, 10.0)]) == 2
    assert desired_instances([*usual, times(0.1, 10.0)]) == 2


@pytest.mark.parametrize(
    ("history", "desired"),
    [
        # 2 s that no instance shortens, and 16 that are divided.
        ([(18.0, 1), (10.0, 2)], 4),  # which take 6 s, as training does
        ([(18.0, 1), (6.0, 4)], 4),
        ([(10.0, 2), (6.0, 4), (4.0, 8)], 4),
        ([(4.0, 8), (3.6, 10)], 6),  # fewer than there have been: as if all were divided
        # 8 s and 8: even with one per group training waits, and a fourth hardly helps.
        ([(16.0, 1), (12.0, 2)], 3),
        ([(16.0, 1), (8.5, 16)], 3),
        ([(12.0, 2), (8.5, 16)], 3),
        # More took no less time: no more than the fewest.
        ([(12.0, 2), (13.0, 3)], 2),
        ([(12.0, 2), (12.0, 3)], 2),
        # Less than if all were divided.
        ([(30.0, 1), (12.0, 2)], 3),
    ],
)
def test_instances_that_would_not_shorten_the_rollouts_are_not_desired(
    history: list[tuple[float, int]], desired: int
) -> None:
    assert desired_instances([times(rollout_s, 6.0, number) for rollout_s, number in history]) == desired


def test_longer_responses_are_no_slower_instances() -> None:
    before = [times(12.0, 6.0, 1)] * 3
    after = [times(18.0, 18.0, 2, response_tokens=3000)] * 12
    assert desired_instances([*before, *after]) == 2


def test_of_each_number_of_instances_the_last_iterations_are_remembered() -> None:
    history: list[IterationTimes] = []
    for number in (1, 2, 1, 3):
        for rollout_s in range(2 * NUM_RECENT):
            remember(history, times(float(rollout_s), 1.0, number))
    assert [each.num_instances for each in history] == [2] * NUM_RECENT + [1] * NUM_RECENT + [3] * NUM_RECENT
    assert [each.rollout_s for each in history] == [float(at) for at in range(NUM_RECENT, 2 * NUM_RECENT)] * 3


def test_other_numbers_of_instances_are_forgotten_by_their_age_but_for_the_newest() -> None:
    """One instance took 30 s when responses were short; 2 s of the rollouts are not divided, and 16 are."""
    history: list[IterationTimes] = []
    seconds = {1: 30.0, 2: 10.0, 4: 6.0}
    for iteration in range(10 + MAX_AGE):
        number = 1 if iteration < 5 else 2 if iteration < 10 else 4
        remember(history, replace(times(seconds[number], 5.2, number), iteration=iteration))
        if iteration == 20:
            assert {each.num_instances for each in history} == {1, 2, 4} and desired_instances(history) == 4
    assert {each.num_instances for each in history} == {2, 4} and desired_instances(history) == 5
    for iteration in range(1000, 1000 + MAX_AGE):
        remember(history, replace(times(6.0, 5.2, 4), iteration=iteration))
    assert {each.num_instances for each in history} == {2, 4} and desired_instances(history) == 5


def test_idle_shares_are_of_the_whole_iteration() -> None:
    waiting = times(rollout_s=8.0, train_s=6.0, overhead_s=2.0)
    assert waiting.idle_training == pytest.approx(0.2) and waiting.idle_inference == pytest.approx(0.2)
    training = times(rollout_s=6.0, train_s=8.0, overhead_s=2.0)
    assert training.idle_training == 0.0 and training.idle_inference == pytest.approx(0.4)


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_idle_shares_stay_between_0_and_1_whatever_the_clocks_say(seconds: float) -> None:
    odd = IterationTimes(seconds, 2.0, -1e-9, rollout_s=3.0, num_instances=1, num_groups=1, response_tokens=0)
    assert 0.0 <= odd.idle_training <= 1.0 and 0.0 <= odd.idle_inference <= 1.0


def test_advice_names_what_would_balance_the_pools() -> None:
    assert advise([times(20.0, 12.4)], 2) == (
        "training waited 38% of the time for rollouts, inference idled 0%: "
        "2 instances would balance the pools, 1 took part"
    )
    assert "inference idled 60%: 1 instance would balance the pools, 2 took part" in advise([times(4.0, 10.0, 2)], 1)
    assert "inference idled 0%: 3 instances balanced the pools" in advise([times(10.0, 10.0, 3)], 3)


def test_pools_that_take_turns_are_not_to_be_balanced() -> None:
    assert advise([times(20.0, 12.4)], None).endswith("%: the pools take turns")


def test_times_are_read_from_a_record() -> None:
    record = {"seconds": 4.0, "wait_s": 1.0, "train_s": 2.0, "rollout_s": 3.0, "num_instances": 2, "num_groups": 8}
    record["response_tokens"] = 160
    record["iteration"] = 7
    assert IterationTimes.of(record | {"reward_mean": 0.5}) == IterationTimes(4.0, 1.0, 2.0, 3.0, 2, 8, 160, 7)


def test_the_bound_lets_rollouts_overlap_everything_but_publish_and_last_step() -> None:
    parts = {"publish_s": 1.0, "step_s": 2.0, "last_step_s": 2.0}
    assert overlap_bound_s(rollout_s=10.0, train_s=4.0, **parts) == 13.0
    assert overlap_bound_s(rollout_s=4.0, train_s=10.0, **parts) == 13.0
    # Of three steps, two run while the rollouts of later mini-batches go on.
    assert overlap_bound_s(publish_s=1.0, rollout_s=10.0, train_s=4.0, step_s=3.0, last_step_s=1.0) == 12.0


def test_efficiency_is_one_at_the_bound_and_a_half_without_overlap_of_equal_parts() -> None:
    bound_s = overlap_bound_s(publish_s=0.0, rollout_s=5.0, train_s=5.0, step_s=0.0, last_step_s=0.0)
    assert overlap_efficiency(bound_s, 5.0) == 1.0 and overlap_efficiency(bound_s, 10.0) == 0.5
    assert overlap_efficiency(0.0, 0.0) == 0.0
