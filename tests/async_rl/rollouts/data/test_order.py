"""The order of prompts is a function of seed and place, and mixtures keep their weights; any of them."""

import itertools
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.rollouts.data.order import CYCLE, PartOrder, Schedule, shares_of

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


@settings(max_examples=25)
@given(WEIGHTS, st.integers(0, 10**7), st.integers(1, 3000))
def test_any_stretch_of_places_has_each_part_by_its_weight(weights: list[float], first: int, length: int) -> None:
    schedule = Schedule(weights)
    counts = Counter(schedule.part(place)[0] for place in range(first, first + length))
    for part, weight in enumerate(weights):
        share = weight / sum(weights)
        # 2 by the schedule; a place of each cycle by the rounding of weights, and another for the least ones.
        assert abs(counts[part] - length * share) < 2 + 2 * len(weights) * (length / CYCLE + 1)


@settings(max_examples=25)
@given(WEIGHTS, st.integers(0, 3 * CYCLE))
def test_a_part_has_its_places_without_a_gap(weights: list[float], first: int) -> None:
    schedule = Schedule(weights)
    seen = [schedule.count(part, first) for part in range(len(weights))]
    assert sum(seen) == first
    for place in range(first, first + 300):
        part, number = schedule.part(place)
        assert number == seen[part]
        seen[part] += 1


def test_weights_hold_in_every_batch() -> None:
    schedule = Schedule([3, 2, 1])
    for t in range(500):
        counts = Counter(schedule.part(place)[0] for place in range(12 * t, 12 * t + 12))
        assert all(abs(counts[part] - 2 * (3 - part)) <= 1 for part in range(3))


@settings(max_examples=50)
@given(
    st.integers(0, 2**63 - 1),
    st.sampled_from(["", "a", "b"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(0, 100),
    st.randoms(use_true_random=False),
)
def test_epochs_have_each_prompt_once_and_the_curriculum_only_sorts(
    seed: int, part: str, difficulties: list[int], num_sorted: int, random: Any
) -> None:
    num = len(difficulties)
    made = PartOrder(seed, part, num, num_sorted, difficulties)
    plain = PartOrder(seed, part, num)
    places = list(range(3 * num))
    random.shuffle(places)  # asked for in any order, as by a run that resumes
    found = {place: made.index_at(place) for place in places}
    for epoch in range(3):
        start = epoch * num
        assert sorted(found[place] for place in range(start, start + num)) == list(range(num))
        end = min(max(num_sorted, start), start + num)
        assert sorted(found[p] for p in range(start, end)) == sorted(plain.index_at(p) for p in range(start, end))
        for easier, harder in itertools.pairwise(range(start, end)):
            assert difficulties[found[easier]] <= difficulties[found[harder]]
        assert all(found[place] == plain.index_at(place) for place in range(end, start + num))


def test_a_part_needs_as_many_rows_as_its_share_rounded_up_whatever_floats_make_of_it() -> None:
    for percent in range(1, 100):
        assert shares_of([percent / 100, 1 - percent / 100], 100) == [percent, 100 - percent]
    assert shares_of([7.0, 3.0], 8) == [6, 3] and shares_of([1.0], 5) == [5]
