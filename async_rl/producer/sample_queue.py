"""The queue of one replica's groups, mini-batch after mini-batch, as they arrive from the producer, each checked before
it is trained.

The producer puts no more into it than was asked for; what comes nevertheless ends the run. Over all replicas the
ledger proves that each group was trained once, and whole.
"""

from collections.abc import Collection, Sequence

from async_rl.errors import OnPolicyViolation, RolloutLost
from async_rl.method.types import Group, WeightVersion


class SampleQueue:
    """Carries groups of `version`, in their order of arrival.

    Args:
        mini_batches: the indices of each whose groups may come here.
        needed: those of which a group, or a piece of it, has to; by default all.
    """

    def __init__(
        self,
        mini_batches: Sequence[Collection[int]],
        version: WeightVersion,
        *,
        needed: Sequence[Collection[int]] | None = None,
    ) -> None:
        self._version = version
        self._expected = [frozenset(indices) for indices in mini_batches]
        self._due = [set(indices) for indices in (mini_batches if needed is None else needed)]
        """Of each mini-batch, the indices that still have to come."""
        self._groups: list[list[Group]] = [[] for _ in self._expected]
        self._seen: dict[int, set[int]] = {}
        """Of each group that came, its rollouts: those of its pieces come one after the other."""
        self._cancelled: set[int] = set()
        self._num_complete = 0
        self._taking = 0

    def put(self, group: Group) -> None:
        """Adds a group, or a piece of one; a cancelled one is dropped.

        Raises:
            OnPolicyViolation: the group is of another weight version, one of its rollouts is a duplicate, or its index
                is none of those whose groups may come now.
        """
        if group.index in self._cancelled:
            return
        self._require_expected(group)
        self._due[self._num_complete].discard(group.index)
        self._seen.setdefault(group.index, set()).update(_rollouts(group))
        self._groups[self._num_complete].append(group)

    def cancel(self, indices: Collection[int]) -> None:
        """These groups, which have not been taken, are not part of the batch any more."""
        self._cancelled |= set(indices)
        self._due = [due - self._cancelled for due in self._due]
        self._groups = [[group for group in part if group.index not in self._cancelled] for part in self._groups]

    def is_cancelled(self, index: int) -> bool:
        return index in self._cancelled

    def complete(self, number: int) -> None:
        """All groups of this mini-batch that come here have been put.

        Raises:
            RolloutLost: one that had to come is missing.
        """
        assert number == self._num_complete, f"mini-batch {number} ends, but {self._num_complete} has begun"
        if missing := self._due[number]:
            raise RolloutLost(
                f"{len(missing)} of {self._size} rollouts ended without a group and without an error: something "
                "beside them cancelled them; go on from the checkpoint with run.resume = true"
            )
        self._num_complete += 1

    def pop_groups(self) -> list[Group]:
        """The groups of the mini-batch that is taken which were put since the last call."""
        if self._taking == len(self._groups):
            return []
        groups, self._groups[self._taking] = self._groups[self._taking], []
        return groups

    def ends_mini_batch(self) -> bool:
        """Whether all groups of the mini-batch that is taken were; if so, that of the next one is from now on."""
        if self._taking < self._num_complete:
            self._taking += 1
            return True
        return self._num_complete == len(self._groups)

    @property
    def has_all(self) -> bool:
        """Whether all groups that had to come were put."""
        return not any(self._due)

    def _require_expected(self, group: Group) -> None:
        name = f"group {group.index} (prompt {group.prompt.prompt_id})"
        versions = frozenset({group.weight_version}).union(*(r.weight_versions for r in group.responses))
        if versions != {self._version}:
            raise OnPolicyViolation(
                f"{name} has weight versions {sorted(versions)}, "
                f"but this batch trains {self._version!r}: drain the instance before publishing"
            )
        if twice := self._seen.get(group.index, set()).intersection(_rollouts(group)):
            what = name if group.whole is None else f"rollout {min(twice)} of {name}"
            raise OnPolicyViolation(f"{what} came twice: an index of the batch trains once")
        if self._num_complete == len(self._expected):
            raise OnPolicyViolation(f"{name} came after all {self._size} groups")
        if group.index not in self._expected[self._num_complete]:
            raise OnPolicyViolation(f"{name} came to mini-batch {self._num_complete}, of which it is none")

    @property
    def _size(self) -> int:
        return sum(map(len, self._expected))


def _rollouts(group: Group) -> range:
    """The numbers of its rollouts, among those of its whole group."""
    return range(group.first_rollout, group.first_rollout + len(group.rollouts))
