"""Which replica gets which group when: drawn lengths, speeds and arrivals, on a clock of the test's own."""

import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from async_rl.method.types import Batch, Group, GroupKey, Prompt
from async_rl.producer.cutting import num_tokens
from async_rl.producer.dock import Dock, Docking
from async_rl.producer.rounds import Rounds
from tests.support.groups import make_group, make_response, random_group

MICRO_BATCH = 4000


@dataclass
class Trained:
    """A mini-batch as replicas of some speeds trained it."""

    of_replica: list[list[Group]]
    idle_s: list[float]
    """Of each replica, how long it waits at the step."""
    ended_s: float


@dataclass
class Simulation:
    """Replicas that train what the dock gives them, a micro-batch at a time."""

    speeds: Sequence[float]
    max_ahead: float = MICRO_BATCH
    cuts_above: float = math.inf
    now_s: float = 0.0
    max_waiting: int = 0
    pending: list[list[Group]] = field(default_factory=list)

    def run(self, groups: Sequence[Group], finished_s: Sequence[float], *, by_index: bool = False) -> Trained:
        size = len(self.speeds)
        batch = Batch(0, {group.index: group.prompt for group in groups})
        docking = Docking(size, by_index, self.max_ahead, cuts_above=self.cuts_above)
        (dock,) = docking.docks([batch], self._give)
        if isinstance(dock, Dock):
            dock._clock = lambda: self.now_s
        self.pending = [[] for _ in self.speeds]
        self._ended: set[int] = set()
        trained: list[list[Group]] = [[] for _ in self.speeds]
        free_s = [0.0] * size
        events = [(at_s, i, -1) for i, at_s in enumerate(finished_s)]
        heapq.heapify(events)
        is_busy = [False] * size
        while events:
            self.now_s, number, replica = heapq.heappop(events)
            if replica < 0:
                dock.put(groups[number])
            else:
                is_busy[replica] = False
            # Replicas that are free look for work until none has any.
            for r in range(size):
                if is_busy[r]:
                    continue
                window: list[Group] = []
                while self.pending[r] and (
                    not window or sum(map(num_tokens, [*window, self.pending[r][0]])) <= MICRO_BATCH
                ):
                    window.append(self.pending[r].pop(0))
                if window or replica == r:
                    dock.begin(r, [group.key for group in window])
                if window:
                    trained[r] += window
                    free_s[r] = self.now_s + sum(map(num_tokens, window)) / self.speeds[r]
                    is_busy[r] = True
                    heapq.heappush(events, (free_s[r], -1, r))
        assert self._ended == set(range(size)) and dock.is_complete
        ended_s = max(free_s)
        return Trained(trained, [ended_s - each for each in free_s], ended_s)

    def _give(self, replica: int, item: Group | int) -> None:
        if isinstance(item, Group):
            self.pending[replica].append(item)
            self.max_waiting = max(self.max_waiting, sum(map(num_tokens, self.pending[replica])))
        else:
            self._ended.add(replica)


def draw(rng: random.Random, size: int, sigma: float) -> tuple[list[Group], list[float]]:
    """Groups of log-normal lengths, and when each finishes: when its longest response does."""
    groups = [
        random_group(i, 20, [max(1, min(2000, round(100 * rng.lognormvariate(0, sigma)))) for _ in range(4)])
        for i in range(size)
    ]
    finished_s = [max(len(r.token_ids) for r in group.responses) / 100 for group in groups]
    return groups, finished_s


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("max_ahead", [MICRO_BATCH, math.inf])
def test_each_group_goes_to_one_replica_whatever_comes_when(num_replicas: int, max_ahead: float) -> None:
    rng = random.Random()
    for _ in range(10):
        groups, finished_s = draw(rng, rng.randrange(1, 40), 1.5)
        speeds = [rng.uniform(100, 4000) for _ in range(num_replicas)]
        trained = Simulation(speeds, max_ahead).run(groups, finished_s)
        assert sorted(group.index for part in trained.of_replica for group in part) == list(range(len(groups)))


def test_where_shares_are_fixed_each_gets_its_own_indices() -> None:
    rng = random.Random()
    groups, finished_s = draw(rng, 20, 1.0)
    trained = Simulation([500.0, 1000.0, 1000.0]).run(groups, finished_s, by_index=True)
    of_replica = [sorted(group.index for group in part) for part in trained.of_replica]
    assert of_replica == [list(range(r, 20, 3)) for r in range(3)]


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("sigma", [1.0, 1.5])
@pytest.mark.parametrize("slowed", [1.0, 0.5])
def test_what_is_lost_at_the_step_is_little_more_than_the_last_groups_training(
    num_replicas: int, sigma: float, slowed: float
) -> None:
    """While one replica trains the group that finished last the others idle. Fixed shares lose much more if one is
    slow. Training takes as long as the rollouts."""
    rng = random.Random(f"{num_replicas} {sigma} {slowed}")
    lost: dict[bool, list[float]] = {True: [], False: []}
    alone: list[float] = []
    for _ in range(20):
        groups, finished_s = draw(rng, 32 * num_replicas, sigma)
        total = sum(map(num_tokens, groups))
        speed = total / num_replicas / max(finished_s)
        speeds = [speed * slowed, *[speed] * (num_replicas - 1)]
        for by_index, found in lost.items():
            trained = Simulation(speeds).run(groups, finished_s, by_index=by_index)
            found.append(sum(trained.idle_s) / num_replicas / trained.ended_s)
        last_s, last = max(zip(finished_s, groups, strict=True), key=lambda pair: pair[0])
        training_s = num_tokens(last) / speed
        alone.append((num_replicas - 1) / num_replicas * training_s / (last_s + training_s))
    docked, fixed, bound = (sum(found) / len(found) for found in (lost[False], lost[True], alone))
    assert docked < min(0.08, 1.5 * bound)
    assert fixed > (3.0 * docked if slowed < 1.0 else docked)


def test_a_replica_gets_groups_ahead_and_no_more_than_a_micro_batch() -> None:
    rng = random.Random(3)
    groups, _ = draw(rng, 200, 0.5)
    simulation = Simulation([1000.0, 1000.0])
    simulation.run(groups, [0.0] * len(groups))
    assert MICRO_BATCH / 2 < simulation.max_waiting <= MICRO_BATCH + max(map(num_tokens, groups))


def test_mini_batches_come_one_after_the_other_and_end_on_every_replica() -> None:
    given: list[tuple[int, int]] = []
    dock = Dock([[0, 1], [2]], [0, 1], lambda r, item: given.append((r, item.index if isinstance(item, Group) else -1)))
    groups = [random_group(i, 4, (5,)) for i in range(3)]
    dock.put(groups[2])
    assert given == []
    dock.put(groups[0])
    assert len(given) == 1 and not dock.is_complete
    dock.put(groups[1])
    dock.begin(given[0][0], [(0, 0)])
    ends = [i for i, (_, index) in enumerate(given) if index == -1]
    assert [index for _, index in given if index >= 0] == [0, 1, 2] and dock.is_complete
    assert [given[i][0] for i in ends] == [0, 1, 0, 1] and given[ends[1] + 1][1] == 2


def test_groups_that_are_not_needed_are_left_out_wherever_they_are() -> None:
    given: list[object] = []
    dock = Dock([range(5)], [0, 1], lambda r, item: given.append(item), max_ahead=1)
    groups = [random_group(i, 4, (5,)) for i in range(5)]
    dock.put(*groups[:4])
    handed = [item.index for item in given if isinstance(item, Group)]
    assert len(handed) == 2, "one for each, and the rest waits"
    waiting = min({0, 1, 2, 3} - set(handed))
    dock.cancel({waiting, 4})
    dock.put(groups[4])
    dock.begin(0, list(dock._replicas[0].waiting))
    assert dock.is_complete and given[-2:] == [0, 0]
    assert {item.index for item in given if isinstance(item, Group)} == set(range(4)) - {waiting}


def test_what_waits_is_given_largest_first_and_to_the_replica_that_is_done_first() -> None:
    now_s, given = 0.0, []
    dock = Dock(
        [range(6)],
        [0, 1],
        lambda r, item: given.append((r, item.index)) if isinstance(item, Group) else None,
        max_ahead=1,
        speeds={0: 100.0, 1: 300.0},
        clock=lambda: now_s,
    )
    groups = [random_group(i, 4, (10 * (i + 1),)) for i in range(6)]
    dock.put(groups[5])
    assert given == [(1, 5)], "the faster one"
    dock.put(*groups[:5])
    assert given[1:] == [(0, 4)], "the largest; the other one has something that waits"
    dock.begin(1, [(5, 0)])
    assert given[2:] == [(1, 3)]
    dock.begin(0, [(4, 0)])
    assert given[3:] == [(0, 2)], "whoever has nothing gets something, even if another would have finished it sooner"


def test_where_training_waits_for_the_batch_parts_are_equal_whoever_answers_first() -> None:
    """Algorithms that need a batch's totals take all windows before they train the first."""
    given: dict[int, int] = dict.fromkeys(range(4), 0)
    now_s, speeds = 0.0, {}

    def give(replica: int, item: Group | int) -> None:
        given[replica] += num_tokens(item) if isinstance(item, Group) else 0

    groups, _ = draw(random.Random(1), 128, 1.0)
    docking = Docking(4, max_ahead=MICRO_BATCH, holds=True, speeds=speeds)
    (dock,) = docking.docks([Batch(0, {group.index: group.prompt for group in groups})], give)
    assert isinstance(dock, Dock)
    dock._clock = lambda: now_s
    dock.put(*groups)
    assert dock.is_complete
    for _ in range(3):
        dock.begin(0, list(dock._replicas[0].waiting)[:1])
        now_s += 0.001
    assert max(given.values()) - min(given.values()) <= max(map(num_tokens, groups)) and speeds == {}


def test_where_training_waits_for_the_batch_a_long_group_makes_parts_equal() -> None:
    given: dict[int, list[Group]] = {replica: [] for replica in range(4)}

    def give(replica: int, item: Group | int) -> None:
        if isinstance(item, Group):
            given[replica].append(item)

    groups = [*(random_group(i, 10, [100] * 4) for i in range(3)), random_group(3, 10, [200] * 16)]
    docking = Docking(4, holds=True, cuts_above=1000)
    (dock,) = docking.docks([Batch(0, {group.index: group.prompt for group in groups})], give)
    dock.put(*groups)
    assert dock.is_complete and rollouts_of(list(given.values())) == sorted(
        (group.index, i) for group in groups for i in range(len(group.rollouts))
    )
    tokens = [sum(map(num_tokens, part)) for part in given.values()]
    assert max(tokens) - min(tokens) <= 2 * 200, "but for a rollout more or less"


def test_a_measured_speed_follows_the_replica() -> None:
    now_s, speeds = 0.0, {}
    dock = Dock([range(40)], [0, 1], lambda r, item: None, max_ahead=1, speeds=speeds, clock=lambda: now_s)
    groups = [random_group(i, 4, (96,)) for i in range(40)]
    dock.put(*groups)
    for _ in range(10):
        dock.begin(0, list(dock._replicas[0].waiting))
        now_s += 2.0
    assert speeds == {0: pytest.approx(50.0)}


def rollouts_of(trained: Sequence[Sequence[Group]]) -> list[tuple[int, int]]:
    """(index, number of the rollout) of each that was trained."""
    groups = [group for part in trained for group in part]
    return sorted((group.index, group.first_rollout + i) for group in groups for i in range(len(group.rollouts)))


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_of_long_groups_each_rollout_is_trained_once_and_short_ones_stay_whole(
    num_replicas: int, by_index: bool
) -> None:
    rng = random.Random()
    num_pieces = 0
    for _ in range(10):
        groups, finished_s = draw(rng, rng.randrange(1, 12), 1.5)
        simulation = Simulation([rng.uniform(500, 4000) for _ in range(num_replicas)], cuts_above=1000)
        trained = simulation.run(groups, finished_s, by_index=by_index)
        assert rollouts_of(trained.of_replica) == [(i, number) for i in range(len(groups)) for number in range(4)]
        pieces = [group for part in trained.of_replica for group in part if group.whole is not None]
        assert all(num_tokens(groups[group.index]) > 1000 for group in pieces)
        num_pieces += len(pieces)
        if by_index:
            for replica, part in enumerate(trained.of_replica):
                assert {group.index for group in part if group.first_rollout == 0} == set(
                    range(replica, len(groups), num_replicas)
                )
    assert (num_pieces > 0) == (num_replicas > 1)


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_one_long_group_after_short_ones_takes_all_replicas(num_replicas: int, by_index: bool) -> None:
    size = 8 * num_replicas
    groups = [random_group(i, 20, [30] * 4) for i in range(size)] + [random_group(size, 100, [1000] * 16)]
    finished_s = [0.0] * size + [20.0]
    ended_s = {
        cuts_above: Simulation([1000.0] * num_replicas, cuts_above=cuts_above).run(
            groups, finished_s, by_index=by_index
        )
        for cuts_above in (math.inf, 2000)
    }
    whole, cut = (ended_s[cuts_above].ended_s - 20.0 for cuts_above in (math.inf, 2000))
    assert whole == pytest.approx(16.1) and cut == pytest.approx(16.0 / num_replicas + 0.1)
    # Slow and fast replicas end together, but for a rollout.
    if not by_index:
        speeds = [500.0] + [1500.0] * (num_replicas - 1)
        trained = Simulation(speeds, cuts_above=2000).run(groups, finished_s)
        assert trained.ended_s - 20.0 < 16_000 / sum(speeds) + 2.5


@pytest.mark.parametrize(("num_groups", "num_replicas"), [(2, 3), (3, 4), (5, 8), (8, 5)])
def test_long_groups_of_equal_length_take_the_replicas_that_have_none(num_groups: int, num_replicas: int) -> None:
    groups = [plain_group(i, 50, [400] * 8) for i in range(num_groups)]
    for by_index in (False, True):
        trained = Simulation([1000.0] * num_replicas, cuts_above=1000).run(
            groups, [0.0] * num_groups, by_index=by_index
        )
        # A rollout, of 0.4 s, is not divided, and each piece has the prompt; a whole group takes 3.25 s.
        even_s = sum(map(num_tokens, groups)) / num_replicas / 1000
        assert trained.ended_s < even_s + 0.75, by_index


def test_a_group_stays_whole_where_others_fill_the_time_or_the_prompt_costs_more() -> None:
    even = [random_group(i, 20, [500] * 8) for i in range(8)]
    long_prompts = [random_group(0, 3000, [500] * 4), random_group(1, 20, [500] * 4)]
    for groups in (even, long_prompts):
        for by_index in (False, True):
            trained = Simulation([1000.0] * 2, cuts_above=1000).run(groups, [0.0] * len(groups), by_index=by_index)
            assert all(group.whole is None for part in trained.of_replica for group in part)


def plain_group(index: int, num_prompt_tokens: int, response_lens: Sequence[int]) -> Group:
    """Of these lengths; all tokens are the same, since drawing them would take longest."""
    return make_group(index, [make_response([1] * length) for length in response_lens], prompt=[1] * num_prompt_tokens)


MIXES: dict[str, tuple[int, float, int, int]] = {
    "one group": (1, 0.0, 64, 1000),
    "few groups": (6, 1.0, 64, 1000),
    "log-normal": (32, 1.5, 64, 500),
    "equal": (32, 0.0, 64, 500),
    "long prompts": (16, 1.0, 2000, 500),
}
"""Groups, the sigma of their lengths, tokens of prompts, median of responses."""


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
@pytest.mark.parametrize("mix", list(MIXES))
def test_cutting_shortens_the_end_of_a_batch_and_never_lengthens_it_by_much(mix: str, num_replicas: int) -> None:
    """Of ten batches each; training takes as long as rollouts do. By index a long group waits for its round."""
    size, sigma, num_prompt, median = MIXES[mix]
    rng = random.Random(f"{mix} {num_replicas}")
    for by_index in (False, True):
        ratios: list[float] = []
        for _ in range(10):
            lengths = [round(median * rng.lognormvariate(0, sigma)) + 1 for _ in range(size)]
            groups = [
                plain_group(i, num_prompt, [max(1, round(rng.uniform(0.5, 1.5) * length)) for _ in range(8)])
                for i, length in enumerate(lengths)
            ]
            finished_s = [max(len(r.token_ids) for r in group.responses) / 100 for group in groups]
            speeds = [sum(map(num_tokens, groups)) / num_replicas / max(finished_s)] * num_replicas
            whole, cut = (
                Simulation(speeds, cuts_above=above).run(groups, finished_s, by_index=by_index).ended_s
                for above in (math.inf, MICRO_BATCH)
            )
            ratios.append(cut / whole)
        mean = sum(ratios) / len(ratios)
        name = f"{mix}, {num_replicas} replicas, {'by index' if by_index else 'as they finish'}"
        print(f"{name}: {mean:.3f} of the time ({min(ratios):.3f} to {max(ratios):.3f})")
        assert mean <= (1.02 if by_index else 1.0) and max(ratios) < (1.2 if by_index else 1.1)
        if mix == "one group":
            assert mean < 0.85


def test_by_index_pieces_follow_from_lengths_whatever_finishes_when() -> None:
    rng = random.Random()
    groups, _ = draw(rng, 30, 1.5)
    batches = [Batch(0, {i: groups[i].prompt for i in indices}) for indices in (range(14), range(14, 30))]
    found: list[list[list[GroupKey]]] = []
    for _ in range(5):
        given: list[list[GroupKey]] = [[] for _ in range(3)]

        def give(replica: int, item: Group | int, given: list[list[GroupKey]] = given) -> None:
            given[replica].append((*item.key, len(item.rollouts)) if isinstance(item, Group) else (item,))

        (rounds,) = Docking(3, by_index=True, cuts_above=800).docks(batches, give)
        for group in rng.sample(groups, len(groups)):
            rounds.put(group)
        assert rounds.is_complete
        for part in given:
            ends = [i for i, each in enumerate(part) if len(each) == 1]
            assert [part[i] for i in ends] == [(0,), (1,)] and ends[-1] == len(part) - 1
            assert {key[0] < 14 for key in part[: ends[0]]} == {True} and min(part[ends[0] + 1 : -1])[0] >= 14
        found.append([sorted(part) for part in given])
    assert all(each == found[0] for each in found) and any(key[1] for part in found[0] for key in part if len(key) > 1)


def test_shares_are_fixed_by_index_and_for_a_reserve() -> None:
    prompts = {i: Prompt(f"p{i}", (1,), {}) for i in range(6)}
    whole, reserve = Batch(0, prompts), Batch(0, prompts, 4)
    for by_index in (True, False):
        shares = Docking(3, by_index).docks([reserve], lambda r, item: None)
        assert [sorted(set().union(*dock._missing)) for dock in shares] == [[0, 3], [1, 4], [2, 5]]
    (dock,) = Docking(3).docks([whole], lambda r, item: None)
    assert isinstance(dock, Dock)
    (rounds,) = Docking(3, by_index=True).docks([whole], lambda r, item: None)
    assert isinstance(rounds, Rounds)


def test_a_large_batch_is_placed_in_no_time() -> None:
    """8,192 groups that go to 64 replicas."""
    groups = [random_group(i, 4, (5 + i % 7,)) for i in range(8192)]
    pending: list[list[GroupKey]] = [[] for _ in range(64)]
    dock = Dock(
        [range(8192)],
        range(64),
        lambda r, item: pending[r].append(item.key) if isinstance(item, Group) else None,
        max_ahead=100,
    )
    began_s = time.process_time()
    dock.put(*groups)
    while not dock.is_complete:
        for replica in range(64):
            begun, pending[replica] = pending[replica], []
            dock.begin(replica, begun)
    # About one second; the square of the groups would take minutes.
    assert time.process_time() - began_s < 10.0
