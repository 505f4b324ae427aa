"""95% confidence intervals of means over prompts; pure functions, for `figures.py`.

The unit is the prompt: the samples of one are not independent. Each prompt has one value, the mean or the pass@k of its
samples, and the standard error is that of the mean of these values. As all prompts have the same number of samples, it
is the clustered standard error of arXiv 2411.00640, section 2.2, but for the factor P / (P - 1).

Shapes: P prompts.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, fmean, variance

LEVEL = 0.95

Interval = tuple[float, float]

_NORMAL = NormalDist().inv_cdf(0.5 + LEVEL / 2)


def share_interval(values_P: Sequence[float], num_independent: int) -> Interval:
    """The interval of the mean of values in [0, 1], itself in [0, 1] and never of width 0.

    Wilson's score interval, whose width follows from one number, z^2 / n. In its place stands t^2 (standard error)^2 /
    (p (1 - p)) with Student's t of P - 1 degrees of freedom, which is z^2 / n where the samples are independent. It is
    bounded on both sides: values in [0, 1] vary at most as P independent samples would, and never count as more than
    `num_independent` samples. Where all values are 0 or all are 1, the standard error says nothing and the first bound
    holds: Wilson's interval of P samples. One prompt says nothing about others: [0, 1].
    """
    num_prompts = len(values_P)
    if num_prompts < 2:
        return 0.0, 1.0
    share = min(max(fmean(values_P), 0.0), 1.0)
    widest, narrowest = _NORMAL**2 / num_prompts, _NORMAL**2 / max(num_independent, num_prompts)
    spread = share * (1.0 - share)
    width = widest
    if spread > 0.0:
        error_squared = variance(values_P) / num_prompts
        width = min(max(t_quantile(num_prompts - 1) ** 2 * error_squared / spread, narrowest), widest)
    centre, half = share + width / 2, math.sqrt(width * spread + width**2 / 4)
    # Rounding must not leave the mean outside.
    low, high = (centre - half) / (1 + width), (centre + half) / (1 + width)
    return min(max(low, 0.0), share), max(min(high, 1.0), share)


def mean_interval(values_P: Sequence[float]) -> Interval | None:
    """The interval of the mean of values without bounds, by Student's t.

    None where there is one, all are equal, or they differ by more than float64 can square.
    """
    num_prompts = len(values_P)
    try:
        error = math.sqrt(variance(values_P) / num_prompts) if num_prompts > 1 else 0.0
    except OverflowError:
        return None
    if error == 0.0:
        return None
    mean, half = fmean(values_P), t_quantile(num_prompts - 1) * error
    return mean - half, mean + half


@cache
def t_quantile(degrees: int) -> float:
    """The quantile of Student's t that leaves (1 - LEVEL) / 2 above it; from 1,000 degrees on the same, too large by
    0.1% at most."""
    degrees = min(degrees, 1000)
    low, high = _NORMAL, 2.0 * _NORMAL
    while _t_between(high, degrees) < LEVEL:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_between(middle, degrees) < LEVEL else (low, middle)
    return high


def _t_between(t: float, degrees: int) -> float:
    """P(-t < T < t); the finite sums for whole degrees of freedom of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    total, term = 0.0, cosine if is_odd else 1.0
    for step in range(2 if is_odd else 1, degrees, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    return 2.0 / math.pi * (angle + sine * total) if is_odd else sine * total
