"""Which groups may be trained next: in order of completion, or by index in the batch, mini-batch after mini-batch.

`mode = "synchronous"` waits for the whole batch first, as a baseline. `order = "prompt"` trains groups by their index
in the batch, holding back groups that finished early, so that sums are formed in the same order in every run. Of a
batch with a reserve only the selected groups are trained, those without a signal last if by index.
"""

from collections.abc import Callable, Sequence

from async_rl.config.sections import TrainSection
from async_rl.group_proof import GroupProof
from async_rl.selection.finished_groups import FinishedGroups, SelectedGroups
from async_rl.types import Batch, Group


class TrainingOrder:
    """Returns the groups of one batch, or of a replica's share, in training order; used by the training thread."""

    def __init__(self, finished: FinishedGroups, config: TrainSection, mini_batches: Sequence[Batch]) -> None:
        self.by_index = config.order == "prompt"
        self._selected: SelectedGroups | None = None
        if any(mini_batch.has_reserve for mini_batch in mini_batches):
            (share,) = mini_batches
            finished = self._selected = SelectedGroups(finished, share, by_index=self.by_index)
        self._finished = finished
        self._synchronous = config.mode == "synchronous"
        self._indices = [sorted(mini_batch.prompts) for mini_batch in mini_batches]
        self._due: list[int] = []
        self._held: list[Group] = []
        self._all_arrived = False
        self.watch: Callable[[], None] = lambda: None
        """Called whenever groups are requested; an exception it raises ends the batch."""

    def begin_mini_batch(self) -> None:
        """From now on `take` returns the groups of the next mini-batch; those of later ones wait."""
        self._due = self._indices.pop(0)

    def take(self, wait: bool) -> list[Group]:
        """The groups that may be trained now.

        With `wait` at least one, and none only when the mini-batch is complete: all its indices were returned and, for
        the last mini-batch, the whole batch has arrived, since a surplus group must be detected.
        """
        self.watch()
        if not wait:
            self._fetch(wait=False)
        while True:
            groups = self._pick()
            if groups or not wait or self._all_arrived or (self._indices and not self._due):
                return groups
            self._fetch(wait=True)

    def left_out(self) -> list[GroupProof]:
        """Rows, for the ledger, of the groups that the selection passed over; known when the batch is complete."""
        return [] if self._selected is None else self._selected.left_out()

    def _fetch(self, wait: bool) -> None:
        if self._all_arrived:
            return
        arrived = self._finished.ready(wait)
        self._held += arrived
        self._all_arrived = wait and not arrived

    def _pick(self) -> list[Group]:
        if self._synchronous:
            while not self._all_arrived:
                self._fetch(wait=True)
        later = {index for indices in self._indices for index in indices}
        groups = [group for group in self._held if group.index not in later]
        if self.by_index and self._selected is None:
            groups = self._next_by_index(groups)
        self._held = _without(self._held, groups)
        taken = {group.index for group in groups}
        self._due = [index for index in self._due if index not in taken]
        return groups

    def _next_by_index(self, groups: Sequence[Group]) -> list[Group]:
        held = {group.index: group for group in groups}
        picked: list[Group] = []
        for index in self._due:
            if index not in held:
                break
            picked.append(held.pop(index))
        # Groups that belong to no index of the batch are returned last; the ledger will report them.
        complete = self._all_arrived and len(picked) == len(self._due)
        return [*picked, *_without(groups, picked)] if complete else picked


def _without(groups: Sequence[Group], picked: Sequence[Group]) -> list[Group]:
    """By identity: comparing groups would compare their tokens, and a group that arrived twice must stay two."""
    taken = {id(group) for group in picked}
    return [group for group in groups if id(group) not in taken]
