"""Which prompts are passed over: those that had no signal when they were last drawn (`prompts.pass_over`).

What a batch draws is a function of the seed, the iteration, and a history of earlier iterations. All ranks keep the
same history, from the rows of the proofs, and a checkpoint has it: a run that resumes draws the same prompts.
"""

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.rollouts.data.order import PartOrder
from async_rl.rollouts.data.packed import packed, unpacked

logger = logging.getLogger(__name__)

DrawnRow = tuple[int, int]
"""The number of a part, and the index of a prompt in it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Prompts that a batch takes, by their places; what it passed over; and where each part goes on."""

    rows: tuple[DrawnRow, ...]
    passed_over: Counter[DrawnRow]
    next_places: tuple[int, ...]


class History:
    """How often each prompt is still to be passed over, one byte each, and how far each part was gone through.

    The prompts of a part come in the order of its epochs. A prompt that is passed over is due once less.
    """

    def __init__(self, sizes: Sequence[int], pass_over: int) -> None:
        self._pass_over = pass_over
        self._due = [array("B", bytes(size)) for size in sizes]
        self._next_places = [0] * len(sizes)

    def draw(self, parts: Sequence[int], orders: Sequence[PartOrder]) -> Draw:
        """The prompts of a batch whose places have these parts; no prompt twice, unless a part has too few."""
        places, rows, passed_over = list(self._next_places), list[DrawnRow](), Counter[DrawnRow]()
        taken: list[set[int]] = [set() for _ in orders]
        for part in parts:
            if len(taken[part]) == len(self._due[part]):
                taken[part].clear()
            while True:
                index = orders[part].at(places[part])
                places[part] += 1
                if index in taken[part]:
                    continue
                if self._due[part][index] <= passed_over[part, index]:
                    break
                passed_over[part, index] += 1
            taken[part].add(index)
            rows.append((part, index))
        return Draw(tuple(rows), +passed_over, tuple(places))

    def note(self, draw: Draw, have_signal: Mapping[DrawnRow, bool]) -> None:
        """A draw was trained; of these of its prompts it is known whether they had a signal."""
        for (part, index), times in draw.passed_over.items():
            self._due[part][index] -= times
        for (part, index), has_signal in have_signal.items():
            self._due[part][index] = 0 if has_signal else self._pass_over
        self._next_places = list(draw.next_places)

    @property
    def sha256(self) -> str:
        """Of the places and bytes, from which the next draw follows."""
        digest = hashlib.sha256(repr(self._next_places).encode())
        for due in self._due:
            digest.update(due)
        return digest.hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {"next_places": self._next_places, "due": [packed(due) for due in self._due]}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """From `as_json`; a history of other prompts is not taken, and neither is that of a run that had none."""
        due = [unpacked("B", each) for each in saved["due"]] if saved is not None else []
        if saved is None or list(map(len, due)) != list(map(len, self._due)):
            logger.warning("the checkpoint has no history of these prompts: none of them is passed over at first")
            return
        self._due = [array("B", [min(times, self._pass_over) for times in each]) for each in due]
        self._next_places = list(saved["next_places"])
