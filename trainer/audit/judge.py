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
from trainer.audit.hypotheses import Hypothesis, class_name
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
    """`cause` by its name; `detail` with figures. `is_whole`: rounding explains the rest."""

    cause: str
    detail: str
    is_whole: bool


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
        """Mean |difference| in nats per token, each at most the clip of the limits; of the checkpoint by default."""
        gaps_N = (self.expected_N if scored_N is None else scored_N) - self.reported_N
        return float(gaps_N.abs().nan_to_num(math.inf).clamp(max=self.limits.clip).mean())

    def sigmas(self, scored_N: torch.Tensor, beside_N: torch.Tensor | None = None) -> float:
        """By how many standard errors more than half of the tokens are nearer to these log-probs than to others, by
        default the checkpoint's."""
        beside_N = self.expected_N if beside_N is None else beside_N
        moves_N = (scored_N - beside_N).abs() > LEAST_MOVE
        nearer_N = (scored_N - self.reported_N).abs() < (beside_N - self.reported_N).abs()
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


@dataclass(slots=True)
class _Best:
    name: str
    distance: float
    scored_N: torch.Tensor


class Explainer:
    """Looks for what explains `evidence`; `hidden` collects the hypotheses that these tokens cannot tell."""

    def __init__(self, exact: ExactModel, evidence: Evidence) -> None:
        self._exact = exact
        self._evidence = evidence
        self.best: _Best | None = None
        self.hidden: list[str] = []

    def try_all(self, candidates: Iterable[Hypothesis]) -> None:
        """Scores them, and keeps the nearest of those that most tokens are nearer to."""
        for candidate in candidates:
            self._offer(candidate.name, candidate.score(self._exact, self._evidence.samples))

    def try_sets(self, units: Mapping[str, object], make: Callable[[str, Sequence[str]], Hypothesis]) -> None:
        """Sets of units, such as classes that are stale: the unit that brings the log-probs nearest, then with it the
        next, as long as most tokens are nearer with it."""
        chosen: list[str] = []
        now_N = self._evidence.expected_N
        while len(chosen) < min(MAX_ROUNDS, len(units)) and not (self.best and self._is_whole(self.best.scored_N)):
            found: _Best | None = None
            for unit in (unit for unit in units if unit not in chosen):
                name = " and ".join([*chosen, unit])
                scored_N = make(name, [*chosen, unit]).score(self._exact, self._evidence.samples)
                if scored_N is None:
                    continue
                distance = self._evidence.distance(scored_N)
                if found is None or distance < found.distance:
                    found = _Best(unit, distance, scored_N)
            if found is None or self._evidence.sigmas(found.scored_N, now_N) <= SIGMAS:
                return
            chosen.append(found.name)
            now_N = found.scored_N
            self._offer(" and ".join(chosen), now_N)

    @property
    def explanation(self) -> Explanation | None:
        """The nearest hypothesis, if it is clearly nearer than the checkpoint."""
        if self.best is None:
            return None
        own, other = self._evidence.distance(), self.best.distance
        is_whole = self._is_whole(self.best.scored_N)
        if not is_whole and other * CLEARLY >= own:
            return None
        rest = "rounding explains the rest" if is_whole else "which rounding does not explain"
        detail = f"{own:.3g} nats per token from the checkpoint, {other:.3g} from {self.best.name}: {rest}"
        return Explanation(self.best.name, detail, is_whole)

    def _is_whole(self, scored_N: torch.Tensor) -> bool:
        return explains(scored_N, self._evidence.reported_N, self._evidence.limits)

    def _offer(self, name: str, scored_N: torch.Tensor | None) -> None:
        if scored_N is None or not bool(scored_N.isfinite().all()):
            return
        sigmas = self._evidence.sigmas(scored_N)
        if abs(sigmas) <= SIGMAS:
            self.hidden.append(name)
        distance = self._evidence.distance(scored_N)
        if sigmas > SIGMAS and (self.best is None or distance < self.best.distance):
            self.best = _Best(name, distance, scored_N)


def wide_responses(evidence: Evidence) -> list[bool]:
    """For each sample whether more of its tokens are far from the checkpoint's than a sound engine has, as
    `rollouts.publish.probe` counts them."""
    gaps_N = (evidence.expected_N - evidence.reported_N).abs()
    parts = gaps_N.split([len(sample.tokens) for sample in evidence.samples])
    return [float((part > WIDE * evidence.limits.noise).double().mean()) > MAX_WIDE for part in parts]


def where_it_matters(exact: ExactModel, evidence: Evidence, num_named: int = 3) -> list[str]:
    """The classes, then the layers, of which the same relative change would bring log-probs nearest, to first order.

    One pass forward and back, which takes the memory of the weights' gradient.
    """
    for parameter in exact.model.parameters():
        parameter.requires_grad_(True)
    sizes: dict[str, float] = {}
    try:
        for sample, reported_n in zip(
            evidence.samples, evidence.reported_N.split([len(s.tokens) for s in evidence.samples]), strict=True
        ):
            ids = torch.tensor([[*sample.prompt, *sample.tokens[:-1]]], device=exact.device)
            logits_nV = exact.model(ids, use_cache=False, logits_to_keep=len(sample.tokens)).logits[0].float()
            own_n = (logits_nV / sample.temperature).log_softmax(-1)
            own_n = own_n.gather(1, torch.tensor(sample.tokens, device=exact.device)[:, None])[:, 0]
            gaps_n = (own_n - reported_n.to(own_n)).clamp(-evidence.limits.clip, evidence.limits.clip)
            gaps_n.square().sum().backward()
        for name, parameter in exact.model.named_parameters():
            if parameter.grad is not None:
                size = float(parameter.grad.norm() * parameter.norm())
                keys = [class_name(name)]
                if ".layers." in name:
                    keys.append("layer " + name.partition(".layers.")[2].partition(".")[0])
                for key in keys:
                    sizes[key] = math.hypot(sizes.get(key, 0.0), size)
    finally:
        for parameter in exact.model.parameters():
            parameter.grad = None
            parameter.requires_grad_(False)
    classes, layers = ([key for key in sizes if key.startswith("layer ") is is_layer] for is_layer in (False, True))
    return [key for keys in (classes, layers) for key in sorted(keys, key=lambda key: -sizes[key])[:num_named]]
