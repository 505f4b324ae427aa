"""Sums of gaps add up in any grouping, survive JSON, and give quantiles as exact as their bins."""

import json
import math
from dataclasses import asdict
from itertools import pairwise
from random import Random

import pytest

from async_rl.method.proof.logprob_gaps import BINS_PER_OCTAVE, SMALLEST, LogprobGaps


def gaps_of(values: list[float]) -> LogprobGaps:
    """As the trainer sums them, token by token."""
    bins: dict[int, int] = {}
    for value in values:
        place = max(0, math.ceil(BINS_PER_OCTAVE * math.log2(abs(value) / SMALLEST))) if value else 0
        bins[place] = bins.get(place, 0) + 1
    return LogprobGaps(
        len(values),
        0,
        sum(values),
        sum(map(abs, values)),
        sum(value**2 for value in values),
        sum(max(-1.0, min(1.0, value)) for value in values),
        sum(max(-1.0, min(1.0, value)) ** 2 for value in values),
        sum(math.exp(value) - 1 - value for value in values),
        max(map(abs, values), default=0.0),
        tuple(sorted(bins.items())),
    )


def values_of(rng: Random, num: int) -> list[float]:
    return [rng.choice((rng.gauss(0, 0.01), rng.gauss(0, 3), 0.0, 2.0**-60)) for _ in range(num)]


@pytest.mark.parametrize("num_parts", [1, 2, 5, 40])
def test_parts_add_up_to_the_whole_however_they_are_cut(num_parts: int) -> None:
    rng = Random(num_parts)
    values = values_of(rng, 300)
    bounds = sorted([0, len(values), *(rng.randint(0, len(values)) for _ in range(num_parts - 1))])
    whole, total = gaps_of(values), LogprobGaps.total(gaps_of(values[a:b]) for a, b in pairwise(bounds))
    assert (total.count, total.bins, total.largest) == (whole.count, whole.bins, whole.largest)
    for name in ("mean", "mean_abs", "rms", "clipped_mean", "clipped_rms", "k1", "k3"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name), abs=1e-12), name
    assert LogprobGaps.total([total, LogprobGaps()]) == total


def test_of_nothing_every_figure_is_zero() -> None:
    for empty in (LogprobGaps(), LogprobGaps.total([])):
        assert set(empty.figures().values()) == {0} and empty.quantile(1.0) == 0.0
        assert (empty.clipped_mean, empty.clipped_rms) == (0.0, 0.0)
    assert LogprobGaps(num_bad=3).figures()["tokens"] == 0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_a_quantile_is_never_below_the_true_one_and_at_most_a_bin_above_it(share: float) -> None:
    for seed in range(40):
        rng = Random(seed)
        values = values_of(rng, rng.randint(1, 200))
        gaps = gaps_of(values)
        true = sorted(map(abs, values))[math.ceil(share * len(values)) - 1]
        bound = max(true * 2 ** (1 / BINS_PER_OCTAVE), SMALLEST) * (1 + 1e-9)
        assert true * (1 - 1e-9) <= gaps.quantile(share) <= bound
        assert gaps.quantile(share) <= gaps.largest


def test_the_figures_come_back_from_json_as_they_were() -> None:
    gaps = gaps_of(values_of(Random(0), 100))
    assert LogprobGaps.from_json(json.loads(json.dumps(asdict(gaps)))) == gaps


def test_kl_estimates_have_the_sign_of_the_definition() -> None:
    """d = trainer - rollout: a rollout that is surer than the trainer has a positive k1; k3 is never negative."""
    assert gaps_of([-0.5, -0.1]).k1 == pytest.approx(0.3) and gaps_of([0.5]).k1 == -0.5
    assert all(gaps_of(values_of(Random(seed), 20)).k3 >= 0 for seed in range(50))
