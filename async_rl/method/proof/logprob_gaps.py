"""How far the trainer's log-probs of sampled tokens are from the rollout's, as sums that add up.

d = trainer - rollout, of one token, in nats. `trainer/logprob_gaps.py` sums over a rank's micro-batches; the rows of a
batch sum to each instance's figures and to the batch's; nothing is kept per token. `gap_limits.py` judges them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

BINS_PER_OCTAVE = 8
"""|d| is counted in bins whose bounds are 9% apart, which is the accuracy of a quantile."""

SMALLEST = 2.0**-40
"""Up to it, |d| is in bin 0; bin i ends at SMALLEST x 2^(i / BINS_PER_OCTAVE)."""

MIXED = "several instances"
"""The instance of an answer that several requests generated: its record names only the last one's."""


@dataclass(frozen=True, slots=True)
class LogprobGaps:
    """Sums over `count` tokens with a finite d; `num_bad` more have none, because one of the log-probs is not finite.

    `clipped_sum` and `clipped_squares` are of d cut at +- the clip of the run (see `gap_limits.NoiseLimits`), which
    bounds the influence of one token. `bins` has pairs (bin of |d|, tokens in it). `hotter_sum` and `colder_sum` are,
    over `num_drawn` tokens, how much likelier they are at another temperature, in nats (see `draws.py`).
    """

    count: int = 0
    num_bad: int = 0
    signed_sum: float = 0.0
    abs_sum: float = 0.0
    squares: float = 0.0
    clipped_sum: float = 0.0
    clipped_squares: float = 0.0
    k3_sum: float = 0.0
    largest: float = 0.0
    bins: tuple[tuple[int, int], ...] = ()
    num_drawn: int = 0
    hotter_sum: float = 0.0
    colder_sum: float = 0.0

    @classmethod
    def total(cls, parts: "Iterable[LogprobGaps]") -> "LogprobGaps":
        """The sums over the tokens of all parts."""
        every = list(parts)
        bins: Counter[int] = Counter()
        for part in every:
            bins.update(dict(part.bins))
        sums = {f.name: sum(getattr(part, f.name) for part in every) for f in fields(cls) if f.name not in _NO_SUMS}
        largest = max((part.largest for part in every), default=0.0)
        return cls(**sums, largest=largest, bins=tuple(sorted(bins.items())))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "LogprobGaps":
        return cls(**{**value, "bins": tuple((number, count) for number, count in value["bins"])})

    @property
    def mean(self) -> float:
        return self.signed_sum / self.count if self.count else 0.0

    @property
    def mean_abs(self) -> float:
        return self.abs_sum / self.count if self.count else 0.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def clipped_mean(self) -> float:
        return self.clipped_sum / self.count if self.count else 0.0

    @property
    def clipped_rms(self) -> float:
        return math.sqrt(self.clipped_squares / self.count) if self.count else 0.0

    @property
    def k1(self) -> float:
        """KL(rollout || trainer) as the mean of -d: unbiased, noisy."""
        return 0.0 - self.mean

    @property
    def k3(self) -> float:
        """The same as the mean of exp(d) - 1 - d, which is never negative and less noisy."""
        return self.k3_sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The |d| at or below which `share` of the tokens are: the upper bound of its bin, at most the largest."""
        seen = 0
        for number, count in self.bins:
            seen += count
            if seen >= share * self.count:
                return min(self.largest, SMALLEST * 2 ** (number / BINS_PER_OCTAVE))
        return 0.0

    def figures(self) -> dict[str, float]:
        """The figures in the records."""
        return {
            "tokens": self.count,
            "mean": self.mean,
            "mean_abs": self.mean_abs,
            "rms": self.rms,
            "p99": self.quantile(0.99),
            "max": self.largest,
            "k1": self.k1,
            "k3": self.k3,
        }


_NO_SUMS = ("largest", "bins")
