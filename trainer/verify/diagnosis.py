"""Which fault explains the log-probs that an instance reported: pure decisions; `scoring.py` has the model.

d = trainer - rollout, in nats, of N sampled tokens; y(T) are the trainer's log-probs at temperature T. If rounding does
not explain d, these are tried in turn, and the first one that does is named:

- *temperature*: y(T) at another T, found by Gauss-Newton steps in ln T on the sum of squares of y(T) - rollout;
- *head*: y with the head of the first publish;
- *dtype*: y of the model in the other dtype. For an instance in float32 that is exact; roundings of two programs in
  bfloat16 are alike only in part, so it is enough that d is of their size and correlated with the trainer's own;
- *rounding*: only `train.exact` forbids it;
- *weights*: none of them.

Independent of what was reported, the tokens themselves tell the temperature that they were sampled at: the score of
their likelihood, S'(ln T) = d/d ln T sum(y(T)), has mean 0 and variance -S'' if it is T, since the terms of sampled
sequences are martingale differences.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits, noise_scale
from async_rl.rollouts.publish.canary import CLEARLY
from trainer.logprob_gaps import sums_of

Cause = Literal["temperature", "head", "dtype", "rounding", "weights"]

FACTORS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
"""Temperatures, relative to the config's, from which a fit starts: the one with the smallest error."""

NUM_STEPS = 8
MAX_STEP = 0.5
STEP_OF_LOG = 0.05
"""In ln T, for derivatives of y(T): the error of a larger one grows with its square, a smaller one's is rounding."""

SIGMAS = 6.0
"""Of the likelihood's score: one batch in 10^9."""

LEAST_CORRELATION = 0.3
"""Between d and what the other dtype changes. The weights' own rounding is the same in both, so the tests measure over
0.5; unrelated ones have 0 +- 0.06 over 256 tokens."""

Score = Callable[[float], torch.Tensor]
"""Temperature -> the trainer's log-probs, float64 [N]."""


class Hypotheses(Protocol):
    """The trainer's log-probs of the same N tokens, float64 [N], under what may be wrong; None: there is no such."""

    def logprobs_at(self, temperature: float) -> torch.Tensor: ...

    def with_first_head(self) -> torch.Tensor | None: ...

    def in_other_dtype(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with an instance, if anything: `cause` is None where nothing is, or too few tokens tell.

    `score_sigmas` is the likelihood's score over its standard error; `log_temperature_error` the standard error of ln T
    that the tokens leave, None where they tell nothing of T; `temperature` the one that the tokens, or the
    reported log-probs, are most likely of where it is not the config's; `is_of_sampling`: the log-probs are right, and
    the tokens were not drawn by them.
    """

    num_tokens: int
    rms: float
    cause: Cause | None = None
    detail: str = ""
    score_sigmas: float | None = None
    log_temperature_error: float | None = None
    temperature: float | None = None
    is_of_sampling: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether there were enough tokens."""
        return self.score_sigmas is not None


def diagnose(
    reported_N: torch.Tensor, hypotheses: Hypotheses, limits: NoiseLimits, temperature: float, dtype: str
) -> Diagnosis:
    """Judges the log-probs that one instance reported, float64 [N], of tokens that it sampled at `temperature`."""
    expected_N = hypotheses.logprobs_at(temperature)
    rms = _rms(expected_N - reported_N)
    found = Diagnosis(len(reported_N), rms)
    if len(reported_N) < MIN_TOKENS:
        return replace(found, detail=f"{len(reported_N)} tokens, of {MIN_TOKENS} that are needed")
    score, information = _likelihood(hypotheses.logprobs_at, temperature)
    found = replace(found, score_sigmas=0.0)
    if information > 0:
        error = 1 / math.sqrt(information)
        found = replace(found, score_sigmas=score * error, log_temperature_error=error)
    if explains(expected_N, reported_N, limits):
        if dtype == "bfloat16" and _is_float32(hypotheses, reported_N, rms):
            return replace(found, cause="dtype", detail="computes in float32, the trainer in bfloat16")
        return _judge_sampling(found, reported_N, hypotheses.logprobs_at, temperature)
    return _explain(found, reported_N, expected_N, hypotheses, limits, temperature, dtype)


def _explain(
    found: Diagnosis,
    reported_N: torch.Tensor,
    expected_N: torch.Tensor,
    hypotheses: Hypotheses,
    limits: NoiseLimits,
    temperature: float,
    dtype: str,
) -> Diagnosis:
    """The cause of log-probs that rounding does not explain."""
    if limits.exact and explains(expected_N, reported_N, replace(limits, exact=False)):
        return replace(found, cause="rounding", detail="rounds in another way, which train.exact forbids")
    fitted = fit_temperature(reported_N, hypotheses.logprobs_at, temperature)
    if explains(hypotheses.logprobs_at(fitted), reported_N, replace(limits, exact=False)):
        said = f"reports log-probs of temperature {fitted:.3g}, rollout.temperature is {temperature:g}"
        return replace(found, cause="temperature", detail=said, temperature=fitted)
    stale_N = hypotheses.with_first_head()
    if stale_N is not None and explains(stale_N, reported_N, replace(limits, exact=False)):
        return replace(found, cause="head", detail="computes with the head (lm_head) of the first publish")
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    if not limits.exact and _is_of_dtype(other, hypotheses.in_other_dtype(), reported_N, expected_N):
        return replace(found, cause="dtype", detail=f"computes in {other}, the trainer in {dtype}")
    return replace(found, cause="weights", detail="computes with other weights: no other fault explains its log-probs")


def explains(scored_N: torch.Tensor, reported_N: torch.Tensor, limits: NoiseLimits) -> bool:
    """Whether rounding explains the differences."""
    gaps = sums_of(scored_N - reported_N, limits.clip)
    return not gaps.num_bad and not limits.excesses("", gaps)


def _is_float32(hypotheses: Hypotheses, reported_N: torch.Tensor, rms: float) -> bool:
    """Whether an instance of a trainer in bfloat16 computes in float32; both roundings are within a batch's limits."""
    scored_N, noise = hypotheses.in_other_dtype(), noise_scale("float32")
    # Where nearly all tokens are certain their roundings are 0 in any dtype, and limits clip the few that are not.
    is_nearer = _rms(scored_N - reported_N) * CLEARLY < rms
    return explains(scored_N, reported_N, NoiseLimits(noise)) and rms > noise and is_nearer


def _is_of_dtype(other: str, scored_N: torch.Tensor, reported_N: torch.Tensor, expected_N: torch.Tensor) -> bool:
    limits = NoiseLimits(noise_scale(other))
    if not explains(scored_N, reported_N, limits):
        return False
    if other == "float32":
        return True
    pair = torch.stack([reported_N - expected_N, scored_N - expected_N])
    return float(pair.corrcoef()[0, 1]) > LEAST_CORRELATION


def _judge_sampling(found: Diagnosis, reported_N: torch.Tensor, score: Score, temperature: float) -> Diagnosis:
    """Whether tokens whose log-probs are right were also drawn with these probabilities.

    Roundings of a model that is nearly sure of its tokens look like a higher temperature beside the trainer's
    log-probs, and not beside those that were reported: the ratio to these has the mean 1 whatever lies between
    (`async_rl/method/proof/draws.py`).
    """
    assert found.score_sigmas is not None
    if abs(found.score_sigmas) <= SIGMAS:
        return found
    likeliest = likeliest_temperature(score, temperature)
    if float((score(likeliest) - reported_N).sum()) <= SIGMAS**2 / 2:
        return replace(found, log_temperature_error=None)
    said = (
        f"samples as at temperature {likeliest:.3g}, or leaves tokens out (top_p, top_k), though it reports log-probs "
        f"of rollout.temperature {temperature:g}"
    )
    return replace(found, cause="temperature", detail=said, temperature=likeliest, is_of_sampling=True)


def fit_temperature(reported_N: torch.Tensor, score: Score, temperature: float) -> float:
    """The temperature whose log-probs are nearest to the reported ones."""
    start = min(FACTORS, key=lambda factor: float((score(temperature * factor) - reported_N).abs().mean()))
    log = math.log(temperature * start)
    for _ in range(NUM_STEPS):
        residual_N = reported_N - score(math.exp(log))
        slope_N = (score(math.exp(log + STEP_OF_LOG)) - score(math.exp(log - STEP_OF_LOG))) / (2 * STEP_OF_LOG)
        square = float(slope_N.square().sum())
        if square == 0.0:
            break
        step = float((slope_N * residual_N).sum()) / square
        log += max(-MAX_STEP, min(MAX_STEP, step))
        if abs(step) < 1e-7:
            break
    return math.exp(log)


def _likelihood(score: Score, temperature: float) -> tuple[float, float]:
    """(S', -S'') of the tokens' log-likelihood S in ln T."""
    lower, middle, upper = (
        float(score(temperature * math.exp(step)).sum()) for step in (-STEP_OF_LOG, 0.0, STEP_OF_LOG)
    )
    return (upper - lower) / (2 * STEP_OF_LOG), (2 * middle - upper - lower) / STEP_OF_LOG**2


def likeliest_temperature(score: Score, temperature: float) -> float:
    """Newton's method from the likeliest of `FACTORS`."""
    start = max(FACTORS, key=lambda factor: float(score(temperature * factor).sum()))
    log = math.log(temperature * start)
    for _ in range(NUM_STEPS):
        slope, information = _likelihood(score, math.exp(log))
        if information <= 0:
            break
        log += max(-MAX_STEP, min(MAX_STEP, slope / information))
    return math.exp(log)


def _rms(gaps_N: torch.Tensor) -> float:
    return float(gaps_N.square().mean().sqrt()) if len(gaps_N) else 0.0
