"""The selection against its definition, with random rewards, quotas and orders in which groups become known."""

from collections.abc import Sequence
from random import Random

import pytest

from async_rl.method.selection.rule import Selection
from async_rl.method.types import Batch, Prompt, have_signal

PROMPT = Prompt("p", (1,), {})


def selected(rewards: dict[int, Sequence[float]], quota: int) -> list[int]:
    """The definition: those with a signal first, each by index."""
    return sorted(rewards, key=lambda index: (len(set(rewards[index])) == 1, index))[:quota]


def random_share(rng: Random) -> tuple[Batch, dict[int, tuple[float, ...]]]:
    """One leader's share of a random batch, and the rewards that its groups will have."""
    quota, reserve, size = rng.randint(1, 9), rng.randint(0, 9), rng.randint(1, 3)
    batch = Batch(0, dict.fromkeys(range(quota * size + reserve), PROMPT), quota * size)
    share = batch.share(rng.randrange(size), size)
    chance = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    rewards = {i: (1.0, 0.0) if rng.random() < chance else (rng.choice((0.0, 1.0)),) * 2 for i in share.prompts}
    return share, rewards


def test_what_is_certain_or_decided_early_is_never_revised() -> None:
    for seed in range(3000):
        rng = Random(seed)
        share, rewards = random_share(rng)
        expected = selected(rewards, share.num_trained)
        selection = Selection(share)
        for index in rng.sample(sorted(rewards), len(rewards)):
            selection.add_group(index, rewards[index])
            in_order = selection.in_order()
            assert in_order == expected[: len(in_order)], seed
            assert set(in_order) <= selection.certain() <= set(expected), seed
            if selection.is_decided:
                break
        assert selection.is_decided and selection.certain() == set(expected), seed
        last = max(expected) if all(have_signal(rewards[index]) for index in expected) else max(rewards)
        assert selection.left_out() == [i for i in sorted(rewards) if i <= last and i not in expected], seed


def test_nothing_that_is_certain_is_held_back() -> None:
    """A group is called certain as soon as no rewards of the others could leave it out."""
    for seed in range(300):
        rng = Random(seed)
        share = Batch(0, dict.fromkeys(range(rng.randint(2, 6)), PROMPT), rng.randint(1, 2))
        known = {i: rng.choice(((1.0, 0.0), (1.0, 1.0))) for i in share.prompts if rng.random() < 0.6}
        unknown = sorted(share.prompts.keys() - known.keys())
        selection = Selection(share)
        for index, rewards in known.items():
            selection.add_group(index, rewards)
        outcomes = [
            selected(
                known | {i: (1.0, float(bits >> n & 1)) for n, i in enumerate(unknown)},
                share.num_trained,
            )
            for bits in range(2 ** len(unknown))
        ]
        always = set.intersection(*map(set, outcomes)) & known.keys()
        assert selection.certain() == always, seed


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((0.0, 0.0), False), ((0.0, 1.0), True), ((), False), ((1.0,), False), ((float("nan"),) * 2, True)],
)
def test_rewards_that_differ_are_a_signal(rewards: tuple[float, ...], expected: bool) -> None:
    assert have_signal(rewards) is expected
