"""What is trained of a batch with a reserve: every order of arrival, order of training and number of leaders."""

from collections.abc import Collection, Iterator, Sequence
from itertools import count
from random import Random

import pytest

from async_rl.config.train_section import TrainSection
from async_rl.method.group_proof import GroupProof
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Prompt
from tests.async_rl.method.selection.test_rule import random_share, selected
from tests.support.groups import make_group, make_response

MODES = [{}, {"order": "prompt"}]


def group_of(index: int, rewards: Sequence[float]) -> Group:
    return make_group(index, [make_response()] * len(rewards), rewards=rewards)


class Arriving:
    """Groups that arrive in this order, a few between two looks, less those that are cancelled."""

    def __init__(self, groups: Sequence[Group], rng: Random) -> None:
        self._left = list(groups)
        self._rng = rng
        self.returned: set[int] = set()
        self.cancelled: set[int] = set()

    def ready(self, wait: bool) -> list[Group]:
        num = max(self._rng.choice((0, 1, 2, 5)), int(wait))
        arrived, self._left = self._left[:num], self._left[num:]
        self.returned |= {each.index for each in arrived}
        return arrived

    def begin(self, groups: Sequence[Group]) -> None:
        pass

    def cancel(self, indices: Collection[int]) -> None:
        assert not self.returned & set(indices)
        self.cancelled |= set(indices)
        self._left = [each for each in self._left if each.index not in indices]


def calls(order: TrainingOrder, rng: Random) -> Iterator[list[Group]]:
    order.begin_mini_batch()
    while True:
        for _ in range(rng.randrange(3)):
            yield order.next_groups(wait=False)
        taken = order.next_groups(wait=True)
        if not taken:
            return
        yield taken


def train(
    share: Batch, rewards: dict[int, tuple[float, ...]], settings: dict[str, str], rng: Random
) -> tuple[list[int], list[GroupProof], Arriving]:
    arrival = rng.sample(sorted(rewards), len(rewards))
    source = Arriving([group_of(index, rewards[index]) for index in arrival], rng)
    order = TrainingOrder(source, TrainSection.model_validate({"iterations": 1} | settings), [share])
    trained = [each.index for taken in calls(order, rng) for each in taken]
    return trained, order.left_out(), source


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_what_is_trained_depends_on_rewards_and_indices_only(settings: dict[str, str]) -> None:
    for seed in range(1000):
        rng = Random(seed)
        share, rewards = random_share(rng)
        expected = selected(rewards, share.num_trained)
        trained, left_out, source = train(share, rewards, settings, rng)
        if "order" not in settings:
            trained = sorted(trained)
            expected = sorted(expected)
        elif not share.has_reserve:
            expected = sorted(expected)
        assert trained == expected, seed
        assert not any(row.is_trained for row in left_out)
        # Each group of the share is trained, was passed over, or is not needed and was cancelled.
        passed_over = {row.index for row in left_out}
        assert passed_over | set(trained) <= source.returned, seed
        unneeded = share.prompts.keys() - passed_over - set(trained)
        assert source.cancelled <= unneeded, seed
        assert share.prompts.keys() - source.returned == source.cancelled, seed


def test_the_rows_of_left_out_groups_do_not_depend_on_the_order_of_arrival() -> None:
    for seed in range(300):
        share, rewards = random_share(Random(seed))
        kinds = {
            tuple((row.index, row.rewards) for row in train(share, rewards, settings, Random(f"{seed}/{n}"))[1])
            for n, settings in zip(count(), MODES * 2, strict=False)
        }
        assert len(kinds) == 1, seed


def test_a_group_is_handed_out_while_others_run_once_it_is_certain() -> None:
    share = Batch(0, dict.fromkeys(range(5), Prompt("p", (1,), {})), 3)
    source = Arriving([group_of(2, (0.0, 1.0)), group_of(4, (0.0, 1.0)), group_of(1, (1.0, 1.0))], Random(0))
    order = TrainingOrder(source, TrainSection(iterations=1), [share])
    order.begin_mini_batch()
    assert [each.index for each in order.next_groups(wait=True)] == [2], "two groups before it cannot fill three places"


def test_a_group_that_comes_twice_reaches_the_ledger() -> None:
    share = Batch(0, dict.fromkeys(range(3), Prompt("p", (1,), {})), 2)
    twice = [group_of(0, (0.0, 1.0)), group_of(0, (0.0, 1.0)), group_of(1, (0.0, 1.0))]
    order = TrainingOrder(Arriving(twice, Random(1)), TrainSection(iterations=1), [share])
    assert sorted(each.index for taken in calls(order, Random(1)) for each in taken) == [0, 0, 1]
