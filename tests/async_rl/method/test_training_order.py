"""Which groups are handed out when: every order of arrival, size of a batch and number of mini-batches."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from random import Random
from typing import Any

import pytest

from async_rl.config.train_section import TrainSection
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Prompt
from tests.support.finished_groups import Arriving
from tests.support.groups import make_group

PROMPT = Prompt("p", (1,), {})


def arrivals(rng: Random) -> Iterator[int]:
    while True:
        yield rng.choice((0, 0, 1, 2, 5))


def parts_of(places: Sequence[int], num_parts: int) -> list[Batch]:
    return Batch(0, dict.fromkeys(places, PROMPT)).split(num_parts)


def order_of(source: Arriving, places: Sequence[int], num_parts: int, **settings: Any) -> TrainingOrder:
    return TrainingOrder(source, TrainSection(iterations=1, **settings), parts_of(places, num_parts))


def train(order: TrainingOrder, num_parts: int, rng: Random) -> list[list[list[Group]]]:
    """For each mini-batch what was handed out at each call, in a mixture of calls that wait and those that do not."""
    mini_batches = []
    for _ in range(num_parts):
        order.begin_mini_batch()
        calls: list[list[Group]] = []
        while True:
            for _ in range(rng.randrange(3)):
                calls.append(order.next_groups(wait=False))
            calls.append(order.next_groups(wait=True))
            if not calls[-1]:
                break
        mini_batches.append([call for call in calls if call])
    return mini_batches


MODES = [{}, {"order": "prompt"}]


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_every_group_is_handed_out_once_in_its_own_mini_batch(settings: dict[str, str], num_parts: int) -> None:
    rng = Random(num_parts)
    for _ in range(60):
        places = sorted(rng.sample(range(40), rng.randint(num_parts, 12)))
        arriving = [make_group(place) for place in rng.sample(places, len(places))]
        source = Arriving(arriving, parts_of(places, num_parts), arrivals(rng))
        handed_out = train(order_of(source, places, num_parts, **settings), num_parts, rng)
        parts = [sorted(part.prompts) for part in parts_of(places, num_parts)]
        flat = [[each.index for call in calls for each in call] for calls in handed_out]
        assert [sorted(part) for part in flat] == parts
        assert source.ends == num_parts
        if "order" in settings:
            assert flat == parts, "by place is in the order of places"
        else:
            at = {each.index: i for i, each in enumerate(arriving)}
            assert all(part == sorted(part, key=at.__getitem__) for part in flat), "otherwise in that of arrival"


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_by_place_a_group_waits_for_those_before_it_and_for_nothing_else(order: tuple[int, ...]) -> None:
    training = order_of(Arriving([make_group(i) for i in order], counts=iter([1] * 4)), range(4), 1, order="prompt")
    training.begin_mini_batch()
    arrived: set[int] = set()
    handed_out: list[int] = []
    for index in order:
        arrived.add(index)
        handed_out += [each.index for each in training.next_groups(wait=False)]
        complete = next(n for n in range(5) if n not in arrived)
        assert handed_out == list(range(complete))


def test_in_order_of_completion_nothing_is_held_back() -> None:
    training = order_of(Arriving([make_group(i) for i in (2, 0, 1)], counts=iter([1] * 3)), range(3), 1)
    training.begin_mini_batch()
    assert [[each.index for each in training.next_groups(wait=False)] for _ in range(3)] == [[2], [0], [1]]


@pytest.mark.parametrize("settings", MODES, ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_group_too_many_is_handed_out_too_for_the_ledger_to_name(settings: dict[str, str], num_parts: int) -> None:
    """One that came twice, or of no place of the batch: neither is swallowed, nor does either keep the others back."""
    for surplus in (0, 3, 99):
        for seed in range(10):
            rng = Random(seed)
            arriving = [make_group(i) for i in (0, 1, 2, 3, surplus)]
            rng.shuffle(arriving)
            source = Arriving(arriving, parts_of(range(4), num_parts), arrivals(rng))
            handed_out = train(order_of(source, range(4), num_parts, **settings), num_parts, rng)
            everything = [each for calls in handed_out for call in calls for each in call]
            assert sorted(map(id, everything)) == sorted(map(id, arriving))


@pytest.mark.parametrize("settings", MODES, ids=str)
def test_a_batch_that_ends_without_a_group_ends_here_too(settings: dict[str, str]) -> None:
    source = Arriving([make_group(i) for i in (0, 2)], counts=iter([1] * 9))
    training = order_of(source, range(3), 1, **settings)
    handed_out = train(training, 1, Random(0))
    assert {each.index for calls in handed_out for call in calls for each in call} <= {0, 2}
    assert source.ends == 1


def test_the_watch_ends_a_batch_at_the_next_call() -> None:
    def fail() -> None:
        raise RuntimeError("told to end")

    source = Arriving([make_group(0)], counts=iter([]))
    training = order_of(source, range(1), 1)
    training.begin_mini_batch()
    training.watch = fail
    with pytest.raises(RuntimeError, match="told to end"):
        training.next_groups(wait=True)
