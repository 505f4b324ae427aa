"""The queue of one replica's groups: exactly one batch, as it arrives from the producer, checked before it is trained.

The producer puts no more into it than was asked for; what comes nevertheless ends the run.
"""

from collections.abc import Collection

from async_rl.errors import OnPolicyViolation, RolloutLost
from async_rl.types import Group, WeightVersion


class SampleQueue:
    """Carries exactly `num_groups` groups, all of `version`, in order of completion."""

    def __init__(self, num_groups: int, version: WeightVersion) -> None:
        self._num_groups = num_groups
        self._version = version
        self._groups: list[Group] = []
        self._seen: set[int] = set()
        self._cancelled: set[int] = set()

    def put(self, group: Group) -> None:
        """Adds a group; a cancelled one is dropped.

        Raises:
            OnPolicyViolation: the group is of another weight version, its index is a duplicate, or the batch is full.
        """
        if group.index in self._cancelled:
            return
        self._require_expected(group)
        self._seen.add(group.index)
        self._groups.append(group)

    def cancel(self, indices: Collection[int]) -> None:
        """These groups, which have not been taken, are not part of the batch any more."""
        self._cancelled |= set(indices)
        self._num_groups -= len(indices)
        self._seen -= self._cancelled
        self._groups = [group for group in self._groups if group.index not in self._cancelled]

    def is_cancelled(self, index: int | None) -> bool:
        return index in self._cancelled

    def end(self) -> None:
        """No more groups will be put.

        Raises:
            RolloutLost: the batch is not complete.
        """
        if num_missing := self._num_groups - len(self._seen):
            raise RolloutLost(
                f"{num_missing} of {self._num_groups} rollouts ended without a group and without an error: "
                "something beside them cancelled them; go on from the checkpoint with run.resume = true"
            )

    def take(self) -> list[Group]:
        """The groups that were put since the last call."""
        groups, self._groups = self._groups, []
        return groups

    @property
    def has_all(self) -> bool:
        """Whether all groups of the batch were put."""
        return len(self._seen) == self._num_groups

    def _require_expected(self, group: Group) -> None:
        versions = frozenset({group.weight_version}).union(*(r.weight_versions for r in group.responses))
        if versions != {self._version}:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) has weight versions {sorted(versions)}, "
                f"but this batch trains {self._version!r}: drain the instance before publishing"
            )
        if group.index in self._seen:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) came twice: an index of the batch trains once"
            )
        if self.has_all:
            raise OnPolicyViolation(
                f"group {group.index} (prompt {group.prompt.prompt_id}) came after all {self._num_groups} groups"
            )
