"""Whether recorded log-probs are the checkpoint's, and which hypothesis explains them if they are not.

Limits are those of a run's own proof: what rounding explains is `gap_limits.NoiseLimits`, what is clearly nearer
`canary.CLEARLY`. In bfloat16 a limit has room for whole faults, such as weights in int8. There a hypothesis is tested
against the checkpoint by the tokens that are nearer to it: of a sound engine at most half of them are, whatever its
roundings, unless these are the hypothesis. Six standard errors over the half, four neighbouring tokens counting as one
(`gap_limits`), are a fault.

Shape legend: N sampled tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from async_rl.method.proof.gap_limits import SHARED_ERROR, SIGMAS, NoiseLimits, noise_scale
from async_rl.rollouts.publish.canary import CLEARLY
from async_rl.rollouts.publish.probe import MAX_WIDE, WIDE
from trainer.audit.engine import Sample, tokens_in
from trainer.audit.exact_model import ExactModel, reported
from trainer.audit.hypotheses import Hypothesis
from trainer.verify.diagnosis import explains

NUM_EXPLAINED = 320
"""Tokens that hypotheses are scored on: a judgement needs 256 (`gap_limits.MIN_TOKENS`)."""

MAX_ROUNDS = 4
"""Classes, or layers, of which several are stale: so many are looked for."""

LEAST_MOVE = noise_scale("float32")
"""A hypothesis that moves a token by less says nothing about it."""

OTHER_WEIGHTS = "other weights"


@dataclass(frozen=True, slots=True)
class Explanation:
    """`cause` by its name; `detail` with figures; `hypothesis` where one explains it."""

    cause: str
    detail: str
    hypothesis: Hypothesis | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Some recorded tokens, and the checkpoint's log-probs of them, float64 [N]."""

    samples: Sequence[Sample]
    expected_N: torch.Tensor
    reported_N: torch.Tensor
    limits: NoiseLimits

    @classmethod
    def of(cls, exact: ExactModel, samples: Sequence[Sample], dtype: str) -> "Evidence":
        return cls(samples, exact.logprobs(samples), reported(samples), NoiseLimits(noise_scale(dtype)))

    @property
    def is_sound(self) -> bool:
        return explains(self.expected_N, self.reported_N, self.limits)

    @property
    def rms(self) -> float:
        return float((self.expected_N - self.reported_N).square().mean().sqrt())

    def distance(self, scored_N: torch.Tensor | None = None) -> float:
        """Mean |difference| in nats per token; of the checkpoint by default."""
        gaps_N = (self.expected_N if scored_N is None else scored_N) - self.reported_N
        return float(gaps_N.abs().mean())

    def sigmas(self, scored_N: torch.Tensor) -> float:
        """By how many standard errors more than half of the tokens are nearer to these log-probs than to the
        checkpoint's."""
        moves_N = (scored_N - self.expected_N).abs() > LEAST_MOVE
        nearer_N = (scored_N - self.reported_N).abs() < (self.expected_N - self.reported_N).abs()
        num_moved = int(moves_N.sum())
        if not num_moved:
            return 0.0
        return (2 * int((nearer_N & moves_N).sum()) - num_moved) / math.sqrt(SHARED_ERROR * num_moved)


def few(samples: Sequence[Sample], num_tokens: int = NUM_EXPLAINED) -> list[Sample]:
    """Some samples with at least so many tokens, the longest prompts among them: only those show a window."""
    chosen: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.prompt)):
        if tokens_in(chosen) >= num_tokens:
            break
        chosen.append(sample)
    return chosen


@dataclass(frozen=True, slots=True)
class Candidate:
    """A hypothesis with its distance, and the log-probs that it gives, float64 [N]."""

    hypothesis: Hypothesis
    distance: float
    sigmas: float
    scored_N: torch.Tensor


class Explainer:
    """Looks for what explains `evidence`; `best` is the nearest hypothesis that more tokens are nearer to."""

    def __init__(self, exact: ExactModel, evidence: Evidence) -> None:
        self._exact = exact
        self._evidence = evidence
        self.best: Candidate | None = None

    def try_all(self, hypotheses: Iterable[Hypothesis]) -> None:
        for hypothesis in hypotheses:
            self._keep(self._scored(hypothesis))

    def try_sets(self, units: Mapping[str, object], make: Callable[[Sequence[str]], Hypothesis]) -> None:
        """Sets of units, such as classes that are stale: the unit that brings the log-probs nearest, then with it the
        next, until rounding explains the rest."""
        chosen: list[str] = []
        distance = self._evidence.distance()
        while len(chosen) < min(MAX_ROUNDS, len(units)) and not (self.best and self._is_whole(self.best)):
            made = {unit: self._scored(make([*chosen, unit])) for unit in units if unit not in chosen}
            found = {unit: each for unit, each in made.items() if each is not None}
            nearest = min(found, key=lambda unit: found[unit].distance, default=None)
            if nearest is None or found[nearest].distance >= distance:
                return
            chosen.append(nearest)
            distance = found[nearest].distance
            self._keep(found[nearest])

    @property
    def explanation(self) -> Explanation | None:
        """The nearest hypothesis, if six standard errors are for it and it is clearly nearer than the checkpoint."""
        if self.best is None or self.best.sigmas <= SIGMAS:
            return None
        own, other, name = self._evidence.distance(), self.best.distance, self.best.hypothesis.name
        is_whole = self._is_whole(self.best)
        if not is_whole and other * CLEARLY >= own:
            return None
        rest = "rounding explains the rest" if is_whole else "which rounding does not explain"
        detail = f"{own:.3g} nats per token from the checkpoint, {other:.3g} with {name}: {rest}"
        return Explanation(name, detail, self.best.hypothesis)

    def _is_whole(self, candidate: Candidate) -> bool:
        return explains(candidate.scored_N, self._evidence.reported_N, self._evidence.limits)

    def _scored(self, hypothesis: Hypothesis) -> Candidate | None:
        scored_N = hypothesis.score(self._exact, self._evidence.samples)
        if scored_N is None or not bool(scored_N.isfinite().all()):
            return None
        return Candidate(hypothesis, self._evidence.distance(scored_N), self._evidence.sigmas(scored_N), scored_N)

    def _keep(self, found: Candidate | None) -> None:
        if found and found.sigmas > 0 and (self.best is None or found.distance < self.best.distance):
            self.best = found


def wide_responses(evidence: Evidence) -> list[bool]:
    """For each sample whether more of its tokens are far from the checkpoint's than a sound engine has, as
    `rollouts.publish.probe` counts them."""
    gaps_N = (evidence.expected_N - evidence.reported_N).abs()
    parts = gaps_N.split([len(sample.tokens) for sample in evidence.samples])
    return [float((part > WIDE * evidence.limits.noise).double().mean()) > MAX_WIDE for part in parts]
