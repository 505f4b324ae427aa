"""The simulation keeps to what no schedule can do, and shows what scheduling does."""

import pytest

from benchmarks.tail import (
    DEFAULT,
    FIRST_COME,
    MEAN_TOKENS,
    NUM_PROMPTS,
    POLICIES,
    PREFILL_S,
    PROMPT,
    SLOTS,
    Policy,
    Prompts,
    measure,
    oracle,
    step_s,
)


@pytest.mark.parametrize("num_instances", [1, 3])
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_is_faster_than_the_bound_and_each_generates_everything(name: str, num_instances: int) -> None:
    prompts = Prompts(1.5, 0, num_prompts=12, num_responses=4)
    epoch = measure(POLICIES[name], num_instances, prompts)
    assert set(epoch.finished_s) == set(range(12))
    for training in (0.5, 1.0):
        done = epoch.trained(training)
        assert done.iteration_s >= done.bound_s
        assert 0 <= done.tail_s <= done.wait_s <= done.iteration_s - done.first_s


@pytest.mark.parametrize("policy", [FIRST_COME, DEFAULT])
@pytest.mark.parametrize("num_instances", [1, 2])
def test_responses_of_one_length_have_no_tail_beyond_the_prompts(policy: Policy, num_instances: int) -> None:
    prompts = Prompts(0.0, 0)
    epoch = measure(policy, num_instances, prompts)
    prompts_s = NUM_PROMPTS * len(PROMPT) * PREFILL_S / num_instances
    num_waves = NUM_PROMPTS * prompts.num_responses // (SLOTS * num_instances)
    assert max(epoch.finished_s.values()) == pytest.approx(
        num_waves * MEAN_TOKENS * step_s(SLOTS) + prompts_s, rel=1e-3
    )
    assert epoch.trained().tail_s < prompts_s


def test_one_who_knows_the_lengths_is_faster_and_longest_first_gains_where_one_response_takes_as_long_as_all() -> None:
    draws = [Prompts(1.0, seed, num_prompts=32) for seed in range(3)]

    def mean_s(policy: Policy) -> float:
        return sum(measure(policy, 4, prompts).trained().iteration_s for prompts in draws) / len(draws)

    known_s = sum(oracle(4, prompts).iteration_s for prompts in draws) / len(draws)
    assert known_s <= mean_s(DEFAULT) < mean_s(FIRST_COME)
