"""Replayed rollouts: the same groups in every run."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat

from async_rl.method.types import Batch, Group
from tests.support.finished_groups import Arriving


def one_by_one(groups: Sequence[Group], mini_batches: Sequence[Batch]) -> Arriving:
    """Groups that come one after the other, as far as they are waited for."""
    return Arriving(groups, mini_batches, repeat(0))


class ReplayedRolloutSource:
    """The same groups in every run, finishing in a random order per run; one by one, or all at once, as if training
    waited for the batch."""

    def __init__(self, groups: Sequence[Group], arrival: random.Random, *, all_at_once: bool = False) -> None:
        self._groups = groups
        self._arrival = arrival
        self._all_at_once = all_at_once

    def batch(self, iteration: int) -> Batch:
        return Batch(iteration, {group.index: group.prompt for group in self._groups})

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: str) -> Iterator[Arriving]:
        groups = [replace(group, iteration=mini_batches[0].iteration) for group in self._groups]
        self._arrival.shuffle(groups)
        yield Arriving(groups, mini_batches, repeat(len(groups) if self._all_at_once else 0))
