"""The dock: finished groups wait here until a replica of the trainer is about to run dry, and go to it then.

Nobody knows a group's length before it has finished, so a share that is dealt by index makes some replica the last one
at each step. The dock gives the largest group that waits to the replica that will have finished it first, by what it
still has to train and how fast it trains. A replica gets groups ahead of its need, so that no round trip is waited for:
at most a micro-batch, and near the end of a mini-batch less and less, as in guided self-scheduling (Polychronopoulos
and Kuck, 1987, doi:10.1109/TC.1987.5009495). MindSpeed RL calls such a place a transfer dock (arXiv 2507.19017).

Pure but for its clock: no sockets, no coroutines.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from async_rl.config.sections import Config
from async_rl.method.types import Batch, Group

Give = Callable[[int, Group | int], None]
"""(replica, a group for it, or the number of a mini-batch of which it has all groups that it will get)."""

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
    has what was measured of each replica, in tokens a second, over all batches.
    """

    num_replicas: int = 1
    by_index: bool = False
    max_ahead: float = math.inf
    holds: bool = False
    speeds: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, num_replicas: int) -> "Docking":
        trainer = config.trainer
        max_ahead = math.inf if trainer.trains_backlogs else trainer.micro_batch_tokens
        holds = config.train.mode == "synchronous" or config.run.placement == "turns"
        return cls(num_replicas, config.train.order == "prompt", max_ahead, holds)

    def docks(self, mini_batches: Sequence[Batch], give: Give) -> "list[Dock]":
        """One for all replicas, or where shares are fixed one for each: the dock of index i is `i % len(docks)`."""
        if not has_fixed_shares(mini_batches, by_index=self.by_index):
            return [self._dock(mini_batches, range(self.num_replicas), give)]
        return [
            self._dock([part.share(replica, self.num_replicas) for part in mini_batches], [replica], give)
            for replica in range(self.num_replicas)
        ]

    def _dock(self, mini_batches: Sequence[Batch], replicas: Sequence[int], give: Give) -> "Dock":
        indices = [part.prompts.keys() for part in mini_batches]
        return Dock(indices, replicas, give, max_ahead=self.max_ahead, speeds=self.speeds, in_equal_parts=self.holds)


def has_fixed_shares(mini_batches: Sequence[Batch], *, by_index: bool) -> bool:
    """Whether a replica trains the groups at its own indices (`Batch.share`) and no others: where they are trained by
    index, and where each share has a quota of a reserve."""
    return by_index or any(part.has_reserve for part in mini_batches)


class _Replica:
    """What a replica has; tokens are those of prompts, once, and of responses."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: dict[int, int] = {}
        """Tokens of each group that it was given and has not begun."""
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give = give
        self._max_ahead = max_ahead
        self._speeds = {} if speeds is None else speeds
        self._in_equal_parts = in_equal_parts
        self._clock = clock
        self._replicas = {number: _Replica(number) for number in replicas}
        self._missing = [set(indices) for indices in mini_batches]
        """Of each mini-batch, the indices that no replica was given."""
        self._part_of = {index: number for number, indices in enumerate(mini_batches) for index in indices}
        self._finished: dict[int, Group] = {}
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
            tokens = num_tokens(group)
            self._finished[group.index] = group
            heapq.heappush(self._heaps[part], (-tokens, group.index))
            self._num_waiting[part] += tokens
            self._num_done += 1
            self._tokens_done += tokens
        self._hand_out()

    def begin(self, replica: int, indices: Sequence[int]) -> None:
        """A replica has ended the window before, and trains these of its groups now; without any it waits."""
        one, now = self._replicas[replica], self._clock()
        if one.in_training and now > one.began_s and not self._in_equal_parts:
            speed = one.in_training / (now - one.began_s)
            known = self._speeds.get(replica, speed)
            self._speeds[replica] = MEMORY * known + (1.0 - MEMORY) * speed
        one.in_training = sum(one.waiting.pop(index) for index in indices)
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
                self._hand(replica, index, tokens)
            elif self._missing[self._current]:
                return
            else:
                self._end_mini_batch()

    def _hand(self, replica: _Replica, index: int, tokens: int) -> None:
        self._num_waiting[self._current] -= tokens
        self._missing[self._current].remove(index)
        replica.waiting[index] = tokens
        replica.num_waiting += tokens
        replica.num_given += tokens
        self._give(replica.number, self._finished.pop(index))

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
        now = self._clock()
        known = self._speeds.values()
        usual = sum(known) / len(known) if known else 1.0

        def finishes(one: _Replica) -> tuple[float, int]:
            speed = self._speeds.get(one.number, usual)
            trained = speed * (now - one.began_s) if known else 0.0
            left = max(0.0, one.in_training - trained)
            return (left + one.num_waiting + tokens) / speed, one.num_given

        return min(free, key=finishes)

    def _ahead(self) -> float:
        """The tokens that may wait at a replica."""
        if len(self._replicas) == 1:
            return math.inf
        num_unfinished = len(self._missing[self._current]) - len(self._heaps[self._current])
        mean = self._tokens_done / max(self._num_done, 1)
        left = self._num_waiting[self._current] + mean * num_unfinished
        return min(self._max_ahead, left / (CHUNKS * len(self._replicas)))


def num_tokens(group: Group) -> int:
    """What training a group costs: its prompt's tokens, once, and those of its responses with prompts of their own."""
    own = sum(len(response.prompt_ids) for response in group.responses if response.prompt_ids is not None)
    return len(group.prompt.token_ids) + own + sum(len(response.token_ids) for response in group.responses)
