"""The order in which prompts are taken: pure functions of the seed and a place, so that a resumed run skips nothing.

The places of a run are numbered from 0 to the end: batch t has the places t*B to t*B + B - 1. Where there are several
parts, a schedule gives each place to one of them. The prompts of a part form one sequence of epochs, each of which has
every prompt once, in an order of its own.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from async_rl.method.seeds import prompt_order

CYCLE = 10_000
"""Places after which the schedule repeats: weights count in steps of this share."""


class Schedule:
    """Which part has each place, by their weights.

    Of any number of first places a part has its share to less than one prompt, and so of any batch to less than two:
    the "chairman assignment" of Tijdeman (1980).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._quotas = _quotas(weights)
        self._parts, self._before = _assigned(self._quotas)

    def part(self, place: int) -> tuple[int, int]:
        """The part that has a place, and how many earlier places it has."""
        cycle, offset = divmod(place, CYCLE)
        part = self._parts[offset]
        return part, cycle * self._quotas[part] + self._before[offset]

    def count(self, part: int, num_places: int) -> int:
        """How many of the first places a part has."""
        cycles, offset = divmod(num_places, CYCLE)
        return cycles * self._quotas[part] + sum(each == part for each in self._parts[:offset])


class PartOrder:
    """The sequence of the prompts of one part.

    Args:
        part: its name; empty for the only part of a run.
        num_by_difficulty: so many first places of the sequence have, within each epoch, their prompts in the order of
            `difficulties`, lowest first.
    """

    def __init__(
        self, seed: int, part: str, num_prompts: int, num_by_difficulty: int = 0, difficulties: Sequence[float] = ()
    ) -> None:
        self._num_prompts = num_prompts

        # An epoch's order is needed for many consecutive batches, and two of them if a batch crosses the boundary.
        @lru_cache(maxsize=2)
        def epoch_order(epoch: int) -> Sequence[int]:
            order = prompt_order(seed, epoch, num_prompts, part)
            num_sorted = min(max(num_by_difficulty - epoch * num_prompts, 0), num_prompts)
            if num_sorted:
                order[:num_sorted] = array("q", sorted(order[:num_sorted], key=difficulties.__getitem__))
            return order

        self._epoch_order = epoch_order

    def index_at(self, place: int) -> int:
        """The index of the prompt at a place of the part's own sequence."""
        epoch, offset = divmod(place, self._num_prompts)
        return self._epoch_order(epoch)[offset]


def shares_of(weights: Sequence[float], num_prompts: int) -> list[int]:
    """How many of so many prompts each part gives, rounded up: a part needs as many rows."""
    # 0.07 of 100 are a little more than 7 as floats.
    return [ceil(num_prompts * weight / sum(weights) - 1e-9) for weight in weights]


def _quotas(weights: Sequence[float]) -> list[int]:
    """How many places of a cycle each part has: one at least, and by the largest remainders."""
    exact = [CYCLE * weight / sum(weights) for weight in weights]
    quotas = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: quotas[part] - exact[part])
    for part in by_remainder[: max(0, CYCLE - sum(quotas))]:
        quotas[part] += 1
    # Parts that were given a place for nothing, at the cost of the largest.
    while sum(quotas) > CYCLE:
        quotas[quotas.index(max(quotas))] -= 1
    return quotas


def _assigned(quotas: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each place of a cycle its part, and how many places this part had before."""
    num_parts = len(quotas)
    parts: list[int] = []
    before: list[int] = []
    counts = [0] * num_parts
    if num_parts == 1:
        return [0] * CYCLE, list(range(CYCLE))
    # In units of 1 / (CYCLE * (2 * num_parts - 2)), so that all numbers are whole.
    unit = 2 * num_parts - 2
    for place in range(1, CYCLE + 1):
        due = [unit * (quota * place - CYCLE * count) for quota, count in zip(quotas, counts, strict=True)]
        # Of the parts that may have it, the one that must have one soonest.
        part = min(
            (part for part in range(num_parts) if due[part] >= CYCLE),
            key=lambda part: ((CYCLE * (unit - 1) - due[part]) / quotas[part], part),
        )
        parts.append(part)
        before.append(counts[part])
        counts[part] += 1
    return parts, before
