"""A log of the faults, with times; every part of `benchmarks.chaos` records its faults here."""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise


class FaultLog:
    """All faults of a run, in order."""

    def __init__(self) -> None:
        self._faults: list[tuple[float, str]] = []

    def note(self, kind: str) -> None:
        self._faults.append((time.monotonic(), kind))

    def count(self, *kinds: str) -> int:
        counts = Counter(kind for _, kind in self._faults)
        return sum(counts[kind] for kind in kinds)

    @property
    def num_faults(self) -> int:
        return len(self._faults)

    def num_before(self, time_s: float) -> int:
        """Faults before a moment of `time.monotonic()`."""
        return sum(at_s < time_s for at_s, _ in self._faults)

    def most_between(self, times_s: Sequence[float]) -> int:
        """The most faults between two successive moments."""
        return max((self.num_before(b) - self.num_before(a) for a, b in pairwise(times_s)), default=0)
