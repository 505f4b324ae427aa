"""The dock: finished groups wait here until a replica of the trainer is about to run dry, and go to it then.

Nobody knows a group's length before it has finished, so a share that is dealt by index makes some replica the last one
at each step. The dock gives the largest group that waits to the replica that will have finished it first, by what it
still has to train and how fast it trains. A replica gets groups ahead of its need, so that no round trip is waited for:
at most a micro-batch, and near the end of a mini-batch less and less, as in guided self-scheduling (Polychronopoulos
and Kuck, 1987, doi:10.1109/TC.1987.5009495). MindSpeed RL calls such a place a transfer dock (arXiv 2507.19017). A
group that is longer than a micro-batch goes in pieces where the other replicas would wait for its end (`cutting.py`).

Pure but for its clock: no sockets, no coroutines.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from async_rl.config.sections import Config
from async_rl.method.pieces import cut
from async_rl.method.types import Batch, Group, GroupKey
from async_rl.producer.cutting import Load, num_rollouts_for, num_tokens
from async_rl.producer.rounds import Give, Rounds

CHUNKS = 2.0
"""A replica is given ahead its part of what is left of a mini-batch, divided by this; guided self-scheduling's usual
factor against uneven pieces."""

MEMORY = 0.7
"""Of a replica's speed: what earlier windows count beside a further one."""


@dataclass(frozen=True, slots=True)
class Docking:
    """How the groups of a run reach its replicas.

    `max_ahead` is the largest number of tokens that wait at a replica while others are free. With `holds` no group
    leaves before all of the batch have finished, and then all do, in parts of equally many tokens: what a replica says
    of training tells nothing where that waits for the whole batch. So it is where both pools take turns, too. `speeds`
    has what was measured of each replica, in tokens a second, over all batches. Groups of up to `cuts_above` tokens are
    never cut.
    """

    num_replicas: int = 1
    by_index: bool = False
    max_ahead: float = math.inf
    holds: bool = False
    speeds: dict[int, float] = field(default_factory=dict)
    cuts_above: float = math.inf

    @classmethod
    def of(cls, config: Config, num_replicas: int, *, cuts: bool) -> "Docking":
        """`cuts`: whether the algorithm can train a group in pieces."""
        trainer = config.trainer
        max_ahead = math.inf if trainer.trains_backlogs else trainer.micro_batch_tokens
        holds = config.train.mode == "synchronous" or config.run.placement == "turns"
        cuts_above = trainer.micro_batch_tokens if cuts else math.inf
        return cls(num_replicas, config.train.order == "prompt", max_ahead, holds, cuts_above=cuts_above)

    def docks(self, mini_batches: Sequence[Batch], give: Give) -> "list[Dock | Rounds]":
        """One for all replicas, or with a reserve one for each: the dock of index i is `i % len(docks)`."""
        if not any(part.has_reserve for part in mini_batches):
            if self.by_index:
                indices = [part.prompts.keys() for part in mini_batches]
                return [Rounds(indices, self.num_replicas, give, cuts_above=self.cuts_above)]
            return [self._dock(mini_batches, range(self.num_replicas), give)]
        return [
            self._dock([part.share(replica, self.num_replicas) for part in mini_batches], [replica], give)
            for replica in range(self.num_replicas)
        ]

    def _dock(self, mini_batches: Sequence[Batch], replicas: Sequence[int], give: Give) -> "Dock":
        indices = [part.prompts.keys() for part in mini_batches]
        return Dock(
            indices,
            replicas,
            give,
            max_ahead=self.max_ahead,
            speeds=self.speeds,
            in_equal_parts=self.holds,
            cuts_above=self.cuts_above,
        )


class _Replica:
    """What a replica has; tokens are those of prompts, once, and of responses."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: dict[GroupKey, int] = {}
        """Tokens of each group or piece that it was given and has not begun."""
        self.num_waiting = 0
        self.num_given = 0
        self.in_training = 0
        self.began_s = 0.0


class Dock:
    """Gives the groups of some mini-batches, one mini-batch after the other, to some replicas.

    Args:
        mini_batches: the indices of each.
        give: called for each group, and for each replica at the end of a mini-batch.
        max_ahead, speeds: see `Docking`; a single replica gets everything at once.
        in_equal_parts: as many tokens for each, at once.
        cuts_above: see `Docking`.
    """

    def __init__(
        self,
        mini_batches: Sequence[Collection[int]],
        replicas: Sequence[int],
        give: Give,
        *,
        max_ahead: float = math.inf,
        speeds: dict[int, float] | None = None,
        in_equal_parts: bool = False,
        cuts_above: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give = give
        self._cuts_above = cuts_above
        self._max_ahead = max_ahead
        self._speeds = {} if speeds is None else speeds
        self._in_equal_parts = in_equal_parts
        self._clock = clock
        self._replicas = {number: _Replica(number) for number in replicas}
        self._missing = [set(indices) for indices in mini_batches]
        """Of each mini-batch, the indices of groups of which no replica was given the last piece."""
        self._part_of = {index: number for number, indices in enumerate(mini_batches) for index in indices}
        self._finished: dict[int, Group] = {}
        """What waits here: groups, and what is left of those of which a piece was given."""
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in mini_batches]
        """Of each mini-batch, what waits here, as (-tokens, index)."""
        self._num_waiting = [0] * len(mini_batches)
        """Their tokens."""
        self._num_done = self._tokens_done = 0
        self._current = 0
        # A share may be empty.
        self._hand_out()

    @property
    def is_complete(self) -> bool:
        """Whether each group was given to a replica, or cancelled."""
        return self._current == len(self._missing)

    def put(self, *groups: Group) -> None:
        """Groups have finished."""
        for group in groups:
            part = self._part_of[group.index]
            if group.index not in self._missing[part]:
                continue  # It was cancelled when it finished.
            assert group.index not in self._finished, f"group {group.index} finished twice"
            self._num_done += 1
            self._tokens_done += self._keep(group)
        self._hand_out()

    def begin(self, replica: int, keys: Sequence[GroupKey]) -> None:
        """A replica has ended the window before, and trains these of its groups now; without any it waits."""
        one, now = self._replicas[replica], self._clock()
        if one.in_training and now > one.began_s and not self._in_equal_parts:
            speed = one.in_training / (now - one.began_s)
            known = self._speeds.get(replica, speed)
            self._speeds[replica] = MEMORY * known + (1.0 - MEMORY) * speed
        one.in_training = sum(one.waiting.pop(key) for key in keys)
        one.num_waiting -= one.in_training
        one.began_s = now
        self._hand_out()

    def cancel(self, indices: Collection[int]) -> None:
        """These groups are not needed any more."""
        for index in indices:
            part = self._part_of[index]
            self._missing[part].discard(index)
            if (group := self._finished.pop(index, None)) is not None:
                self._num_waiting[part] -= num_tokens(group)
        self._hand_out()

    def _hand_out(self) -> None:
        while not self.is_complete:
            heap = self._heaps[self._current]
            while heap and heap[0][1] not in self._finished:
                heapq.heappop(heap)  # It was cancelled.
            if heap:
                tokens, index = -heap[0][0], heap[0][1]
                if (replica := self._next_for(tokens)) is None:
                    return
                heapq.heappop(heap)
                self._num_waiting[self._current] -= tokens
                self._missing[self._current].remove(index)
                self._hand(replica, self._finished.pop(index), tokens)
            elif self._missing[self._current]:
                return
            else:
                self._end_mini_batch()

    def _keep(self, group: Group) -> int:
        """Has a group, or the rest of one, wait; returns its tokens."""
        tokens, part = num_tokens(group), self._part_of[group.index]
        self._finished[group.index] = group
        heapq.heappush(self._heaps[part], (-tokens, group.index))
        self._num_waiting[part] += tokens
        self._missing[part].add(group.index)
        return tokens

    def _hand(self, replica: _Replica, group: Group, tokens: int) -> None:
        """Gives a group that does not wait any more, or a piece of it, whose rest waits."""
        is_long = tokens > self._cuts_above or group.whole is not None
        num = self._num_rollouts_for(replica, group) if is_long else len(group.rollouts)
        if num < len(group.rollouts):
            group, rest = cut(group, num)
            self._keep(rest)
            tokens = num_tokens(group)
        replica.waiting[group.key] = tokens
        replica.num_waiting += tokens
        replica.num_given += tokens
        self._give(replica.number, group)

    def _num_rollouts_for(self, replica: _Replica, group: Group) -> int:
        loads = self._loads(self._replicas.values())
        own = loads.pop(replica.number)
        return num_rollouts_for(group, own, list(loads.values()), self._num_left())

    def _end_mini_batch(self) -> None:
        for number in self._replicas:
            self._give(number, self._current)
        self._current += 1

    def _next_for(self, tokens: int) -> _Replica | None:
        """Who gets the next group: of those that have room, who will have finished it first; None if nobody has."""
        if self._in_equal_parts:
            return min(self._replicas.values(), key=lambda one: one.num_given)
        ahead = self._ahead()
        free = [one for one in self._replicas.values() if not one.num_waiting or one.num_waiting < ahead]
        if len(free) <= 1:
            return free[0] if free else None
        loads = self._loads(free)

        def finishes(one: _Replica) -> tuple[float, int]:
            load = loads[one.number]
            return (load.tokens + tokens) / load.speed, one.num_given

        return min(free, key=finishes)

    def _loads(self, replicas: Collection[_Replica]) -> dict[int, Load]:
        """What each of these has to train, in a time that its measured speed tells, or that of the others."""
        if self._in_equal_parts:
            return {one.number: Load(one.num_given) for one in replicas}
        now, known = self._clock(), self._speeds.values()
        usual = sum(known) / len(known) if known else 1.0
        loads: dict[int, Load] = {}
        for one in replicas:
            speed = self._speeds.get(one.number, usual)
            trained = speed * (now - one.began_s) if known else 0.0
            loads[one.number] = Load(max(0.0, one.in_training - trained) + one.num_waiting, speed)
        return loads

    def _ahead(self) -> float:
        """The tokens that may wait at a replica."""
        if len(self._replicas) == 1:
            return math.inf
        return min(self._max_ahead, self._num_left() / (CHUNKS * len(self._replicas)))

    def _num_left(self) -> float:
        """Tokens of the mini-batch that wait here, and those to expect of groups that have not finished."""
        num_unfinished = len(self._missing[self._current]) - len(self._heaps[self._current])
        mean = self._tokens_done / max(self._num_done, 1)
        return self._num_waiting[self._current] + mean * num_unfinished
