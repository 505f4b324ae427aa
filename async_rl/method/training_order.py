"""Which groups may be trained next: as they come, or by index in the batch, mini-batch after mini-batch.

`order = "prompt"` trains groups by their index in the batch, holding back groups that finished early, so that sums are
formed in the same order in every run; pieces of groups at other replicas' indices come last. Of a batch with a reserve
only the selected groups are trained, those without a signal last if by index.
"""

from collections.abc import Callable, Sequence

from async_rl.config.train_section import TrainSection
from async_rl.method.group_proof import GroupProof
from async_rl.method.selection.finished_groups import FinishedGroups, SelectedGroups
from async_rl.method.types import Batch, Group


class TrainingOrder:
    """Returns the groups that come to a replica in training order; used by the training thread.

    Args:
        mini_batches: the whole of each; by index and with a reserve, groups of the replica's share of them come, by
            index pieces of others, too.
        replica: this one, of `num_replicas`.
    """

    def __init__(
        self,
        finished: FinishedGroups,
        config: TrainSection,
        mini_batches: Sequence[Batch],
        replica: int = 0,
        num_replicas: int = 1,
    ) -> None:
        self.by_index = config.order == "prompt"
        shares = [part.share(replica, num_replicas) for part in mini_batches]
        self._selected: SelectedGroups | None = None
        if any(part.has_reserve for part in mini_batches):
            (share,) = shares
            finished = self._selected = SelectedGroups(finished, share, by_index=self.by_index)
        self._finished = finished
        self._indices = [sorted(share.prompts) for share in shares]
        self._due: list[int] = []
        self._held: list[Group] = []
        self._is_complete = True
        self.watch: Callable[[], None] = lambda: None
        """Called whenever groups are requested; an exception it raises ends the batch."""

    @property
    def has_own(self) -> bool:
        """By index: whether all groups at the replica's indices were taken; from now on only pieces of others come."""
        return not self._due

    def begin_mini_batch(self) -> None:
        """From now on `next_groups` returns the groups of the next mini-batch."""
        self._due, self._is_complete = self._indices.pop(0), False

    def next_groups(self, wait: bool) -> list[Group]:
        """The groups that may be trained now.

        With `wait` at least one, and none only when the mini-batch has no more for this replica.
        """
        self.watch()
        while not self._is_complete:
            arrived = self._finished.ready(wait)
            self._held += arrived
            self._is_complete = wait and not arrived
            if (groups := self._pick()) or not wait:
                return groups
        return self._pick()

    def begin(self, groups: Sequence[Group]) -> None:
        """See `FinishedGroups.begin`."""
        self._finished.begin(groups)

    def left_out(self) -> list[GroupProof]:
        """Rows, for the ledger, of the groups that the selection passed over; known when the batch is complete."""
        return [] if self._selected is None else self._selected.left_out()

    def _pick(self) -> list[Group]:
        groups = self._next_by_index() if self.by_index and self._selected is None else self._held
        self._held = _without(self._held, groups)
        taken = {group.index for group in groups}
        self._due = [index for index in self._due if index not in taken]
        return groups

    def _next_by_index(self) -> list[Group]:
        held = {group.index: group for group in self._held}
        picked: list[Group] = []
        for index in self._due:
            if index not in held:
                break
            picked.append(held.pop(index))
        if not self._is_complete:
            return picked
        # What is not due here: pieces of other replicas' groups. Of anything else the ledger will report it.
        return [*picked, *sorted(_without(self._held, picked), key=lambda group: group.key)]


def _without(groups: Sequence[Group], picked: Sequence[Group]) -> list[Group]:
    """By identity: comparing groups would compare their tokens, and a group that arrived twice must stay two."""
    taken = {id(group) for group in picked}
    return [group for group in groups if id(group) not in taken]
