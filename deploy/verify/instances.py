"""From what the recording found of each instance to findings, broken set-ups by name; called by `verification.py`.

It reads `instances.json` and `not_in_service.json`, which `trainer/verify/recording.py` writes.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.records.findings import Finding, fails, holds, not_tested

LOGPROBS, SAMPLING, CANARY = "log-probs", "sampling", "loading canary"

CAUSES = {
    "temperature": "wrong temperature",
    "head": "stale head",
    "dtype": "other dtype",
    "rounding": "other rounding",
    "weights": "other weights",
}
"""Names of faults by those of `trainer.verify.diagnosis`."""

STALE_COPY = re.compile(r"computes with a stale copy of ([^:]+):")
WRONG_COPY = re.compile(r"computes with wrong ones of ([^:]+):")
WRONG_ADAPTERS = re.compile(r"received the adapters, but computes with ([^:]+):")
OTHER_WEIGHTS = "computes with weights with fingerprints"
OTHER_DTYPE = re.compile(r"has dtype '\w+', the model expects '\w+'")
"""In the reasons that a publish gives: of the canary, of a fingerprint, and of an instance that refuses the tensors."""

NUM_SIGMAS = 6
"""As `trainer.verify.diagnosis` judges by."""

MAX_BLIND_FACTOR = 2.0
"""Between temperatures: tokens that would not show one of this factor have not tested sampling."""

MORE_TOKENS = "raise prompts.prompts_per_batch, rollout.responses_per_prompt or rollout.max_response_tokens"

NOT_DIAGNOSED: Mapping[str, Any] = {
    "cause": None,
    "detail": "",
    "score_sigmas": None,
    "log_temperature_error": None,
    "num_tokens": 0,
    "is_of_sampling": False,
}

Found = Mapping[str, Mapping[str, Any]]
"""URL -> its figures and its diagnosis."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the trainer has not written it."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def judge_instances(urls: Sequence[str], found: Found, *, takes_first: bool) -> list[Finding]:
    """Log-probs and sampling of every instance; `takes_first`: only the groups that finish first are trained."""
    return [finding for url in urls for finding in _judge(url, found.get(url), takes_first)]


def judge_canary(urls: Sequence[str], refused: Mapping[str, str], found: Found) -> list[Finding]:
    """Whether every instance computes with the weights it is sent, class by class.

    `refused` has the reasons of those that were not put in service; a fault that `found` names explains them.
    """
    if not refused:
        return [holds(CANARY, f"every class of tensors reaches what {len(urls)} instance(s) compute with")]
    return [fails(CANARY, why, subject=url, cause=_cause(url, why, found)) for url, why in sorted(refused.items())]


def _cause(url: str, why: str, found: Found) -> str:
    """The fault that a canary saw; log-probs of an instance tell more than its distance from the expected ones."""
    if match := STALE_COPY.search(why):
        # A tied head is published as one tensor with the embedding: an old copy of both is old weights.
        return CAUSES["head"] if match[1] == "head" else f"stale {match[1]}"
    if OTHER_DTYPE.search(why):
        return CAUSES["dtype"]
    if match := WRONG_ADAPTERS.search(why):
        return f"adapters: {match[1]}"
    if OTHER_WEIGHTS in why:
        return CAUSES["weights"]
    diagnosis = (found.get(url) or {}).get("diagnosis") or {}
    if diagnosis.get("cause"):
        return CAUSES[diagnosis["cause"]]
    return f"wrong {match[1]}" if (match := WRONG_COPY.search(why)) else CAUSES["weights"]


def _judge(url: str, figures: Mapping[str, Any] | None, takes_first: bool) -> list[Finding]:
    if figures is None:
        why = "it sampled nothing in the recorded iterations"
        return [not_tested(LOGPROBS, why, url), not_tested(SAMPLING, why, url)]
    diagnosis = figures["diagnosis"] or NOT_DIAGNOSED
    limit, named = figures["largest_rms"], CAUSES.get(diagnosis["cause"] or "", CAUSES["weights"])
    bound = f"RMS {limit:.2g} nats, which rounding explains" if limit else "no difference (train.exact)"
    shown = (
        f"{figures['tokens']} tokens: RMS {figures['rms']:.2g}, mean {figures['mean']:.2g}, "
        f"largest {figures['max']:.2g} nats"
    )
    if figures["num_bad"]:
        shown = f"{figures['num_bad']} log-probs are no finite numbers; {shown}"
    is_of_sampling = diagnosis["cause"] is not None and diagnosis["is_of_sampling"]
    if figures["excesses"] or figures["num_bad"] or (diagnosis["cause"] is not None and not is_of_sampling):
        detail = diagnosis["detail"] or " ".join(figures["excesses"])
        why = f"it tells nothing where log-probs are wrong ({named})"
        return [fails(LOGPROBS, f"{detail}; {shown}", bound, url, named), not_tested(SAMPLING, why, url)]
    if figures["tokens"] < figures["least_tokens"]:
        first = not_tested(LOGPROBS, f"{shown}; {figures['least_tokens']} tokens are needed: {MORE_TOKENS}", url)
    else:
        first = holds(LOGPROBS, shown, bound, url)
    if takes_first:
        why = "with prompts.reserve the groups that finish first are trained: short responses look like a temperature"
        return [first, not_tested(SAMPLING, why, url)]
    return [first, _judge_sampling(url, diagnosis)]


def _judge_sampling(url: str, diagnosis: Mapping[str, Any]) -> Finding:
    sigmas = diagnosis["score_sigmas"]
    if sigmas is None:
        why = f"{diagnosis['detail'] or 'no whole group'} in one iteration: {MORE_TOKENS}"
        return not_tested(SAMPLING, why, url)
    num_tokens, error = diagnosis["num_tokens"], diagnosis["log_temperature_error"]
    drawn = f"likelihood of {num_tokens} tokens of an iteration: {sigmas:.1f} standard errors from rollout.temperature"
    if diagnosis["cause"] is not None:
        bound = f"{NUM_SIGMAS} standard errors"
        return fails(SAMPLING, f"{diagnosis['detail']}; {drawn}", bound, url, CAUSES[diagnosis["cause"]])
    if error is None or error > math.log(MAX_BLIND_FACTOR) / NUM_SIGMAS:
        why = (
            f"{num_tokens} tokens of an iteration are too few to tell their temperature, or too certain: {MORE_TOKENS}"
        )
        return not_tested(SAMPLING, why, url)
    factor = math.exp(NUM_SIGMAS * error)
    return holds(SAMPLING, drawn, f"{NUM_SIGMAS} standard errors: a temperature {factor:.2g} times as high or low", url)
