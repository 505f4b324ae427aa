"""How long the rollouts of an iteration were: a few quantiles and a small histogram; for `group_figures`.

The histogram's edges are the same in every iteration and run (1, 2, 3, 4, 6, 8, 12, 16, ...: two buckets per doubling),
so that histograms can be compared and added.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

_EDGES = [0, 1, *sorted(edge for i in range(1, 40) for edge in (2**i, 3 * 2 ** (i - 1)))]


def length_figures(lengths: Sequence[int]) -> dict[str, Any]:
    """Of sampled tokens per rollout, at least one; a quantile is the smallest length that so large a share reaches."""
    ascending = sorted(lengths)

    def quantile(share: float) -> int:
        return ascending[max(0, math.ceil(share * len(ascending)) - 1)]

    return {
        "response_tokens_min": ascending[0],
        "response_tokens_p50": quantile(0.5),
        "response_tokens_p90": quantile(0.9),
        "response_tokens_max": ascending[-1],
        "response_tokens_histogram": histogram(ascending),
    }


def histogram(lengths: Sequence[int]) -> list[list[int]]:
    """`[lower, upper, count]` of each bucket from the first to the last that holds a length; `upper` is excluded."""
    counts = Counter(bisect_right(_EDGES, length) - 1 for length in lengths)
    return [[_EDGES[i], _EDGES[i + 1], counts[i]] for i in range(min(counts), max(counts) + 1)]
