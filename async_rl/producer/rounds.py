"""Groups by index in the batch: each goes to the replica of its index, a long one in pieces where a round is uneven.

A round is the groups of consecutive indices of which each replica has one. Groups that fit a micro-batch leave as they
finish. A longer one waits until its round has finished, and is cut if the round's tokens are uneven: the replica of its
index gets the first piece, and those with fewer tokens in this round get the rest. So who trains what follows from
lengths alone, never from what finished when. A replica trains pieces of others' groups after its own
(`TrainingOrder`).

Pure: no clocks, no sockets, no coroutines.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from async_rl.method.pieces import cut, may_be_cut
from async_rl.method.types import Group, GroupKey
from async_rl.producer.cutting import Load, num_rollouts_for, num_tokens


class Give(Protocol):
    def __call__(self, replica: int, item: Group | int, /) -> None:
        """A group for a replica, or the number of a mini-batch of which it has all groups that it will get."""
        ...


class Rounds:
    """Gives the groups of some mini-batches to replicas, one mini-batch after the other.

    Args:
        mini_batches: the indices of each.
        give: called for each group or piece, and for each replica at the end of a mini-batch.
        cuts_above: tokens up to which a group is never cut.
    """

    def __init__(
        self, mini_batches: Sequence[Collection[int]], num_replicas: int, give: Give, *, cuts_above: float
    ) -> None:
        self._num_replicas = num_replicas
        self._give = give
        self._cuts_above = cuts_above
        self._missing = [set(indices) for indices in mini_batches]
        """Of each mini-batch, the indices whose groups have not been given."""
        self._part_of = {index: number for number, indices in enumerate(mini_batches) for index in indices}
        self._finished: dict[int, Group] = {}
        """What waits, for its round or for its mini-batch."""
        self._tokens: dict[int, int] = {}
        self._current = 0
        # A mini-batch may be empty.
        self._hand_out(())

    @property
    def is_complete(self) -> bool:
        """Whether each group was given."""
        return self._current == len(self._missing)

    def put(self, *groups: Group) -> None:
        """Groups have finished."""
        for group in groups:
            assert group.index not in self._tokens, f"group {group.index} finished twice"
            self._finished[group.index] = group
            self._tokens[group.index] = num_tokens(group)
        self._hand_out([group.index for group in groups])

    def begin(self, replica: int, keys: Collection[GroupKey]) -> None:
        """A replica trains these now, on which nothing depends here."""

    def cancel(self, indices: Collection[int]) -> None:
        raise AssertionError("only batches with a reserve are cancelled, and they have docks of their own")

    def _hand_out(self, finished: Collection[int]) -> None:
        while not self.is_complete:
            missing = self._missing[self._current]
            for index in sorted(missing.intersection(finished)):
                self._hand_out_round(index)
            if missing:
                return
            for replica in range(self._num_replicas):
                self._give(replica, self._current)
            self._current += 1
            # Those that came early.
            finished = sorted(self._finished)

    def _hand_out_round(self, index: int) -> None:
        """What may leave of the round that has this index."""
        first = index - index % self._num_replicas
        part = self._part_of[index]
        indices = [i for i in range(first, first + self._num_replicas) if self._part_of.get(i) == part]
        here = [i for i in indices if i in self._finished]
        short = [i for i in here if self._tokens[i] <= self._cuts_above]
        for i in short:
            self._hand(i % self._num_replicas, self._finished[i])
        if all(i in self._tokens for i in indices):
            self._level(indices, [i for i in here if i not in short])

    def _level(self, indices: Sequence[int], long: Sequence[int]) -> None:
        """Gives the long groups of a round that has finished, the longest first."""
        loads = dict.fromkeys(range(self._num_replicas), 0) | {i % self._num_replicas: self._tokens[i] for i in indices}
        divisible = {i % self._num_replicas: self._tokens[i] for i in long if may_be_cut(self._finished[i])}
        for index in sorted(long, key=lambda i: (-self._tokens[i], i)):
            group, replica = self._finished[index], index % self._num_replicas
            loads[replica] -= self._tokens[index]
            divisible.pop(replica, None)
            others = set(loads) - {replica}
            while True:
                # Groups that are given after this one fill what it leaves: they are cut, too.
                others_have = [Load(loads[other] - divisible.get(other, 0)) for other in others]
                num = num_rollouts_for(group, Load(loads[replica]), others_have, sum(divisible.values()))
                piece, rest = (group, None) if num == len(group.rollouts) else cut(group, num)
                loads[replica] += num_tokens(piece)
                self._hand(replica, piece)
                if rest is None:
                    break
                group, replica = rest, min(others, key=lambda other: (loads[other], other))
                others.remove(replica)

    def _hand(self, replica: int, group: Group) -> None:
        self._finished.pop(group.index, None)
        self._missing[self._current].discard(group.index)
        self._give(replica, group)
