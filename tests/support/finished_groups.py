"""Groups that come to a replica as a test says, in place of those of a producer."""

from collections.abc import Collection, Iterator, Sequence
from itertools import repeat

from async_rl.method.types import Batch, Group


class Arriving:
    """Groups that come in this order, mini-batch after mini-batch.

    Args:
        mini_batches: by default there is one; a group of none of them comes with the last.
        counts: how many come between two looks; a look that waits gets at least one.

    `begun` has what was begun, one entry for each window or wait; `ends` the number of mini-batches that have ended.
    """

    def __init__(
        self, groups: Sequence[Group], mini_batches: Sequence[Batch] = (), counts: Iterator[int] | None = None
    ) -> None:
        parts = [part.prompts for part in mini_batches] or [{group.index: group.prompt for group in groups}]
        self._left: list[list[Group]] = [[] for _ in parts]
        for group in groups:
            number = next((i for i, prompts in enumerate(parts) if group.index in prompts), len(parts) - 1)
            self._left[number].append(group)
        self._counts = repeat(2) if counts is None else counts
        self.begun: list[list[int]] = []
        self.ends = 0

    def ready(self, wait: bool) -> list[Group]:
        num = max(next(self._counts), int(wait))
        left = self._left[self.ends]
        arrived, left[:] = left[:num], left[num:]
        self.ends += wait and not arrived
        return arrived

    @property
    def num_left(self) -> int:
        """Groups that have not come."""
        return sum(map(len, self._left))

    def begin(self, groups: Sequence[Group]) -> None:
        self.begun.append([group.index for group in groups])

    def cancel(self, indices: Collection[int]) -> None:
        self._left = [[group for group in part if group.index not in indices] for part in self._left]
