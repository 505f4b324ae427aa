"""Which replica gets which group when: drawn lengths, speeds and arrivals, on a clock of the test's own."""

import heapq
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from async_rl.method.types import Batch, Group, Prompt
from async_rl.producer.dock import Dock, Docking, has_fixed_shares, num_tokens
from tests.support.groups import random_group

MICRO_BATCH = 4000


@dataclass
class Trained:
    """A mini-batch as replicas of some speeds trained it."""

    of_replica: list[list[int]]
    idle_s: list[float]
    """Of each replica, how long it waits at the step."""
    ended_s: float


@dataclass
class Simulation:
    """Replicas that train what the dock gives them, a micro-batch at a time."""

    speeds: Sequence[float]
    max_ahead: float = MICRO_BATCH
    now_s: float = 0.0
    max_waiting: int = 0
    pending: list[list[Group]] = field(default_factory=list)

    def run(self, groups: Sequence[Group], finished_s: Sequence[float], *, by_index: bool = False) -> Trained:
        size = len(self.speeds)
        batch = Batch(0, {group.index: group.prompt for group in groups})
        docking = Docking(size, by_index, self.max_ahead)
        docking_docks = docking.docks([batch], self._give)
        for dock in docking_docks:
            dock._clock = lambda: self.now_s
        self.pending = [[] for _ in self.speeds]
        self._ended: set[int] = set()
        trained: list[list[int]] = [[] for _ in self.speeds]
        free_s = [0.0] * size
        events = [(at_s, i, -1) for i, at_s in enumerate(finished_s)]
        heapq.heapify(events)
        is_busy = [False] * size
        while events:
            self.now_s, number, replica = heapq.heappop(events)
            if replica < 0:
                docking_docks[groups[number].index % len(docking_docks)].put(groups[number])
            else:
                is_busy[replica] = False
            # Replicas that are free look for work until none has any.
            for r in range(size):
                if is_busy[r]:
                    continue
                dock = docking_docks[r % len(docking_docks)]
                window: list[Group] = []
                while self.pending[r] and (
                    not window or sum(map(num_tokens, [*window, self.pending[r][0]])) <= MICRO_BATCH
                ):
                    window.append(self.pending[r].pop(0))
                if window or replica == r:
                    dock.begin(r, [group.index for group in window])
                if window:
                    trained[r] += [group.index for group in window]
                    free_s[r] = self.now_s + sum(map(num_tokens, window)) / self.speeds[r]
                    is_busy[r] = True
                    heapq.heappush(events, (free_s[r], -1, r))
        assert self._ended == set(range(size)) and all(dock.is_complete for dock in docking_docks)
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
        assert sorted(i for part in trained.of_replica for i in part) == list(range(len(groups)))


def test_where_shares_are_fixed_each_gets_its_own_indices() -> None:
    rng = random.Random()
    groups, finished_s = draw(rng, 20, 1.0)
    trained = Simulation([500.0, 1000.0, 1000.0]).run(groups, finished_s, by_index=True)
    assert [sorted(part) for part in trained.of_replica] == [list(range(r, 20, 3)) for r in range(3)]


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
    dock.begin(given[0][0], [0])
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
    dock.begin(0, [next(i for i in handed if i in dock._replicas[0].waiting)])
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
    dock.begin(1, [5])
    assert given[2:] == [(1, 3)]
    dock.begin(0, [4])
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
    dock._clock = lambda: now_s
    dock.put(*groups)
    assert dock.is_complete
    for _ in range(3):
        dock.begin(0, list(dock._replicas[0].waiting)[:1])
        now_s += 0.001
    assert max(given.values()) - min(given.values()) <= max(map(num_tokens, groups)) and speeds == {}


def test_a_measured_speed_follows_the_replica() -> None:
    now_s, speeds = 0.0, {}
    dock = Dock([range(40)], [0, 1], lambda r, item: None, max_ahead=1, speeds=speeds, clock=lambda: now_s)
    groups = [random_group(i, 4, (96,)) for i in range(40)]
    dock.put(*groups)
    for _ in range(10):
        dock.begin(0, list(dock._replicas[0].waiting))
        now_s += 2.0
    assert speeds == {0: pytest.approx(50.0)}


def test_shares_are_fixed_by_index_and_for_a_reserve() -> None:
    prompts = {i: Prompt(f"p{i}", (1,), {}) for i in range(6)}
    whole, reserve = Batch(0, prompts), Batch(0, prompts, 4)
    assert has_fixed_shares([whole], by_index=True) and has_fixed_shares([reserve], by_index=False)
    assert not has_fixed_shares([whole], by_index=False)


def test_a_large_batch_is_placed_in_no_time() -> None:
    """8,192 groups that go to 64 replicas."""
    groups = [random_group(i, 4, (5 + i % 7,)) for i in range(8192)]
    pending: list[list[int]] = [[] for _ in range(64)]
    dock = Dock(
        [range(8192)],
        range(64),
        lambda r, item: pending[r].append(item.index) if isinstance(item, Group) else None,
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
