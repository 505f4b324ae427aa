"""The advice of a live run, followed in simulations: it ends where another instance would hardly help."""

import random
from dataclasses import replace

import pytest

from async_rl.records.balance import IterationTimes, desired_instances, remember
from deploy.scaling.simulation import Costs, Outcome, SetUp, Shape, simulate

DEVICE = Costs(
    step_s=0.02,
    token_s=2e-5,
    prompt_token_s=1e-4,
    score_s=0.1,
    window_s=0.2,
    row_s=2e-5,
    optimizer_s=1.0,
    publish_s=2.0,
)
"""Such that a decoding step hardly depends on how many responses run."""

NUM_GROUPS = 64


def followed(costs: Costs, length: float, seed: int, noise: float) -> tuple[list[int], list[Outcome]]:
    """The numbers of instances of sixty iterations, each as the one before desires; and iterations with 1 to 64."""
    rng = random.Random(seed)
    history: list[IterationTimes] = []
    numbers, batch = [1], []
    for iteration in range(60):
        # Responses grow to twice their length.
        mean = length * (1 + iteration / 60)
        batch = [
            Shape(200, tuple(max(1, int(rng.gauss(mean, 0.4 * mean))) for _ in range(8))) for _ in range(NUM_GROUPS)
        ]
        seen = simulate(batch, costs, SetUp(num_instances=numbers[-1]))
        rollout_s = seen.rollout_s * rng.uniform(1 - noise, 1 + noise)
        remember(
            history,
            IterationTimes(
                seen.seconds,
                seen.wait_s,
                seen.train_s,
                rollout_s,
                numbers[-1],
                NUM_GROUPS,
                int(seen.num_response_tokens),
            ),
        )
        numbers.append(desired_instances(history))
    return numbers, [simulate(batch, costs, SetUp(num_instances=n)) for n in range(1, NUM_GROUPS + 1)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("costs", "length", "most"),
    [
        pytest.param(DEVICE, 400, 4, id="a step costs nearly all"),
        pytest.param(replace(DEVICE, row_s=1e-5), 600, 4, id="and training is short"),
        pytest.param(replace(DEVICE, token_s=5e-4), 400, 15, id="responses cost as much"),
        pytest.param(replace(DEVICE, row_s=6e-5), 400, 4, id="training limits"),
        pytest.param(replace(DEVICE, step_s=0.0, token_s=5e-4), 400, 12, id="all is divided"),
    ],
)
def test_advice_that_is_followed_ends_where_another_instance_is_not_worthwhile(
    costs: Costs, length: float, most: int, noise: float, seed: int
) -> None:
    numbers, outcomes = followed(costs, length, seed, noise)
    last = numbers[-20:]
    assert max(last) <= most, numbers
    assert max(last) - min(last) <= 2, numbers
    reached, best = outcomes[min(last) - 1], min(each.seconds for each in outcomes)
    assert reached.seconds <= 1.3 * best or reached.rollout_s <= 1.2 * reached.train_s
