"""Replayed rollouts: the same groups in every run."""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from async_rl.group_proof import GroupProof
from async_rl.types import Batch, Group


class Arriving:
    """Groups that finish one after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = list(groups)

    def ready(self, wait: bool) -> list[Group]:
        return [self._groups.pop(0)] if self._groups and wait else []

    def cancel(self, indices: Collection[int]) -> None:
        self._groups = [group for group in self._groups if group.index not in indices]


class ReplayedRollouts:
    """The same groups in every run, finishing in a random order per run."""

    def __init__(self, groups: Sequence[Group], arrival: random.Random) -> None:
        self._groups = groups
        self._arrival = arrival

    def batch(self, iteration: int) -> Batch:
        return Batch(iteration, {group.index: group.prompt for group in self._groups})

    def note(self, rows: Sequence[GroupProof]) -> None:
        pass

    @contextmanager
    def start(self, batch: Batch, version: str) -> Iterator[Arriving]:
        groups = [replace(group, iteration=batch.iteration) for group in self._groups]
        self._arrival.shuffle(groups)
        yield Arriving(groups)
