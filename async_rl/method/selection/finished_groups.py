"""Groups as rollouts finish them: all of a batch, or only the selected ones of a batch with a reserve."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Protocol

from async_rl.method.group_proof import GroupProof
from async_rl.method.selection.rule import Selection
from async_rl.method.types import Batch, Group


class FinishedGroups(Protocol):
    def ready(self, wait: bool) -> list[Group]:
        """The groups that came here since the last call, in that order, of one mini-batch.

        With `wait` at least one, and none only when the mini-batch has no more for this replica: from then on those of
        the next one. Without, those available now.
        """
        ...

    def begin(self, groups: Sequence[Group]) -> None:
        """These groups are trained from now on, and those before them have been; without any, this replica waits.

        By this others are given while it trains (`producer/dock.py`).
        """
        ...

    def cancel(self, indices: Collection[int]) -> None:
        """Ends the rollouts of these groups, which have not been returned and will not be; the batch ends without."""
        ...


class SelectedGroups:
    """Implements `FinishedGroups` for a share with a reserve: returns each group once it is certain to be trained.

    In order of completion a group waits only while a group before it may still take its place; in order of prompts,
    until all before it have finished. When the selection is decided the remaining rollouts are cancelled.
    """

    def __init__(self, finished: FinishedGroups, share: Batch, *, by_index: bool) -> None:
        self._finished = finished
        self._by_index = by_index
        self._selection = Selection(share)
        self._missing = set(share.prompts)
        self._held: dict[int, Group] = {}
        self._surplus: list[Group] = []
        self._is_decided = False

    def ready(self, wait: bool) -> list[Group]:
        while True:
            arrived = self._finished.ready(wait)
            for group in arrived:
                self._note(group)
            if not self._is_decided and self._selection.is_decided:
                self._is_decided = True
                self.cancel(frozenset(self._missing))
            groups = self._pick() if arrived else []
            if groups or not wait or not arrived:
                return groups

    def begin(self, groups: Sequence[Group]) -> None:
        self._finished.begin(groups)

    def cancel(self, indices: Collection[int]) -> None:
        self._finished.cancel(indices)

    def left_out(self) -> list[GroupProof]:
        """Rows, for the ledger, of the groups that were passed over; none before the selection is decided."""
        left_out = self._selection.left_out() if self._is_decided else []
        return [replace(GroupProof.of(self._held[index], {}), is_trained=False) for index in left_out]

    def _note(self, group: Group) -> None:
        if group.index not in self._missing:
            # It came twice, or belongs to no index of the share: it is trained, for the ledger to report it.
            self._surplus.append(group)
            return
        self._missing.remove(group.index)
        self._held[group.index] = group
        self._selection.add_group(group.index, group.rewards)

    def _pick(self) -> list[Group]:
        if self._by_index:
            indices = [index for index in self._selection.in_order() if index in self._held]
        else:
            certain = self._selection.certain()
            indices = [index for index in self._held if index in certain]
        groups = [*map(self._held.pop, indices), *self._surplus]
        self._surplus.clear()
        return groups
