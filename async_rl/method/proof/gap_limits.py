"""What log-prob gaps prove: limits for batches and instances, from the dtype and the number of tokens.

An engine and the trainer with the same weights still compute each log-prob with different roundings. The size of that
noise follows from the dtype (`noise_scale`); its accuracy over n tokens follows from n. `docs/proof.md` has the
derivation, the measurements, and which difference of weights is found with how many tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from async_rl.config.train_section import TrainSection
from async_rl.method.proof.logprob_gaps import MIXED, LogprobGaps

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
"""Largest relative error of rounding to nearest."""

LOGIT_SCALE = 32.0
"""Logits of language models are within about +- 32, and a logit is rounded relative to its own size."""

SUMMATION = {"float32": 64.0, "bfloat16": 1.0}
"""Growth of the error in a dot product of n terms, sqrt(n) for n = 4096. Kernels for bfloat16 sum in float32."""

HEADROOM = 2.0
"""A correct engine may have this many times the noise scale. Mixtures of experts were reported at 0.9 of it (docs)."""

SIGMAS = 6.0
"""Standard errors between the expected value and a violation: a batch in 10^9 if they were normal."""

SPREAD = 100.0
"""Variance of d^2 over the squared mean of d^2, in units of one over the tokens: 3 for independent normal d times the
weight of tails (a kurtosis of about 30), and about 4 neighbouring tokens that share their error."""

SHARED_ERROR = 4.0
"""This many neighbouring tokens count as one for means: they share a prefix, and its rounding."""

CLIP = 8.0
"""|d| is cut at this many times the asymptotic limit: one token routed to another expert is no proof."""

MIN_TOKENS = 256
"""Fewer prove nothing: one token at the clip would dominate the sum."""

MIN_UNIT_TOKENS = 16
"""Minimum of a group's tokens at an instance for the comparison of instances."""

PEER_FACTOR = 2.0
"""An instance with less than this many times its peers' RMS may be another kind of engine or device."""

KIND_FACTOR = 1.5
"""Another kind of engine or device may have this many times the noise: its groups' RMS are divided by it before
ranking, or among many batches one would report it for noise that is expected of it."""

PEER_FLOOR = 0.25
"""Below this part of the noise scale instances are not compared: different kinds of engines may differ there."""

PEER_SIGMAS = 4.0
"""Of the rank test between an instance's groups and its peers', one-sided: 3e-5 if groups were assigned at random."""


def noise_scale(dtype: str) -> float:
    """RMS of d, in nats per token, that rounding explains."""
    return LOGIT_SCALE * UNIT_ROUNDOFF[dtype] * SUMMATION[dtype]


@dataclass(frozen=True, slots=True)
class Unit:
    """One group's gaps at one instance: the unit of the comparison of instances."""

    instance: str
    gaps: LogprobGaps


@dataclass(frozen=True, slots=True)
class NoiseLimits:
    """Limits for engines whose d has an RMS of at most HEADROOM x `noise` nats."""

    noise: float
    exact: bool = False
    """Whether d has to be 0: no rounding differs (`train.exact`)."""

    @property
    def clip(self) -> float:
        return CLIP * HEADROOM * self.noise

    def largest_rms(self, num_tokens: int) -> float:
        """Of n tokens: a correct engine's RMS, and how much n tokens may scatter around it."""
        return HEADROOM * self.noise * math.sqrt(1 + SIGMAS * math.sqrt(SPREAD / num_tokens))

    def largest_mean(self, num_tokens: int) -> float:
        """Of n tokens: rounding noise lowers log-probs by half its variance; the rest is the mean's standard error."""
        rms = HEADROOM * self.noise
        return rms * rms / 2 + SIGMAS * rms * math.sqrt(SHARED_ERROR / num_tokens)

    def excesses(self, whose: str, gaps: LogprobGaps) -> list[str]:
        """Messages for figures too large to be noise; none if there are too few tokens."""
        if self.exact and gaps.largest > 0:
            return [
                f"{whose}: trainer - rollout log-probs differ by up to {gaps.largest:.3g} nats among {gaps.count} "
                "tokens, train.exact allows no difference: other weights, an instance that was started without "
                "--exact, or another kind of processor or release of torch than the trainer's"
            ]
        if gaps.count < MIN_TOKENS or not math.isfinite(self.noise):
            return []
        figures = (
            ("RMS", gaps.clipped_rms, self.largest_rms(gaps.count)),
            ("mean", gaps.clipped_mean, self.largest_mean(gaps.count)),
        )
        found = [
            f"{name} {value:.3g}, noise explains {limit:.3g}" for name, value, limit in figures if abs(value) > limit
        ]
        if not found:
            return []
        return [
            f"{whose}: trainer - rollout log-probs of {gaps.count} tokens, each cut at {self.clip:.3g} nats, have "
            f"{'; '.join(found)}: other weights, another temperature, or an engine that computes in another way than "
            "model.dtype says (where that is meant, set train.logprob_noise)"
        ]

    def outliers(self, units: Sequence[Unit]) -> list[str]:
        """Messages for instances that deviate from their peers; see `docs/proof.md` for the criteria."""
        by_instance: dict[str, list[LogprobGaps]] = {}
        for unit in units:
            if unit.instance != MIXED and unit.gaps.count >= MIN_UNIT_TOKENS:
                by_instance.setdefault(unit.instance, []).append(unit.gaps)
        totals = {url: LogprobGaps.total(gaps).clipped_rms for url, gaps in by_instance.items()}
        found = []
        for url, own in by_instance.items():
            others = [gaps.clipped_rms for peer, parts in by_instance.items() if peer != url for gaps in parts]
            if not others or totals[url] < PEER_FLOOR * self.noise:
                continue
            usual = median(rms for peer, rms in totals.items() if peer != url)
            sigmas = rank_sigmas([gaps.clipped_rms / KIND_FACTOR for gaps in own], others)
            if totals[url] > PEER_FACTOR * usual and sigmas > PEER_SIGMAS:
                found.append(
                    f"instance {url} deviates from its peers: its trainer - rollout log-probs have an RMS of "
                    f"{totals[url]:.3g} nats, the others' {usual:.3g} ({len(own)} and {len(others)} groups, "
                    f"{sigmas:.1f} standard errors apart by rank): it computes with other weights than they do"
                )
        return found


def noise_limits(section: TrainSection, dtype: str) -> NoiseLimits:
    """The limits of a run that trains in `dtype`."""
    return NoiseLimits(noise_scale(dtype) if section.logprob_noise is None else section.logprob_noise, section.exact)


def rank_sigmas(own: Sequence[float], others: Sequence[float]) -> float:
    """How far `own` are above `others`, by Wilcoxon's rank sum, in standard errors of the sum under no difference."""
    values = sorted([*own, *others])
    ranks: dict[float, float] = {}
    for index, value in enumerate(values):
        first = ranks.setdefault(value, index + 1.0)
        if index + 1 == len(values) or values[index + 1] != value:
            ranks[value] = (first + index + 1) / 2
    excess = sum(ranks[value] for value in own) - len(own) * (len(values) + 1) / 2
    ties = sum(count**3 - count for count in _counts(values))
    num = len(values)
    variance = len(own) * len(others) / 12 * (num + 1 - ties / max(1, num * (num - 1)))
    return excess / math.sqrt(variance) if variance > 0 else 0.0


def _counts(values: Sequence[float]) -> list[int]:
    counts: dict[float, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return list(counts.values())


def unjudged(total: LogprobGaps, by_instance: Mapping[str, LogprobGaps]) -> str | None:
    """Why the tokens of a batch are too few for a judgement, or None."""
    if total.count < MIN_TOKENS:
        return f"{total.count} response tokens are too few to judge log-probs by, {MIN_TOKENS} are needed"
    few = sorted(url for url, gaps in by_instance.items() if gaps.count < MIN_TOKENS)
    if few:
        return f"too few tokens to judge these alone, {MIN_TOKENS} are needed: {', '.join(few)}"
    return None
