"""From what the recording found of each instance to findings, broken set-ups by name; called by `verification.py`.

It reads `instances.json` and `not_in_service.json`, which `trainer/verify/recording.py` writes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.verify.findings import Finding, fails, holds, not_tested

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
OTHER_DTYPE = re.compile(r"has dtype '\w+', the model expects '\w+'")
"""In the reasons that a publish gives: of the canary, and of an instance that refuses the tensors."""

Found = Mapping[str, Mapping[str, Any]]
"""URL -> its figures and its diagnosis."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where the trainer has not written it."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def judge_instances(urls: Sequence[str], found: Found) -> list[Finding]:
    """Log-probs and sampling of every instance."""
    return [finding for url in urls for finding in _judge(url, found.get(url))]


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
    diagnosis = (found.get(url) or {}).get("diagnosis") or {}
    return CAUSES[diagnosis["cause"]] if diagnosis.get("cause") else CAUSES["weights"]


def _judge(url: str, figures: Mapping[str, Any] | None) -> list[Finding]:
    if figures is None or figures["diagnosis"] is None:
        why = "it sampled no whole group in the recorded iterations"
        return [not_tested(LOGPROBS, why, url), not_tested(SAMPLING, why, url)]
    diagnosis = figures["diagnosis"]
    sigmas, cause = diagnosis["score_sigmas"], diagnosis["cause"]
    if sigmas is None:
        why = f"too few tokens: {diagnosis['detail']}; raise --iterations, prompts_per_batch or max_response_tokens"
        return [not_tested(LOGPROBS, why, url), not_tested(SAMPLING, why, url)]
    limit = figures["largest_rms"]
    bound = f"RMS {limit:.2g} nats, which rounding explains" if limit else "no difference (train.exact)"
    shown = (
        f"{figures['tokens']} tokens: RMS {figures['rms']:.2g}, mean {figures['mean']:.2g}, "
        f"largest {figures['max']:.2g} nats"
    )
    drawn = f"likelihood of {diagnosis['num_tokens']} tokens: {sigmas:.1f} standard errors from rollout.temperature"
    is_sampling = cause == "temperature" and not figures["excesses"]
    if cause is not None and not is_sampling:
        named = CAUSES[cause]
        return [fails(LOGPROBS, f"{diagnosis['detail']}; {shown}", bound, url, named), _after(SAMPLING, url, named)]
    if figures["excesses"]:
        return [fails(LOGPROBS, f"{figures['excesses'][0]}", bound, url, CAUSES["weights"]), _after(SAMPLING, url)]
    first = holds(LOGPROBS, shown, bound, url)
    if is_sampling:
        return [first, fails(SAMPLING, f"{diagnosis['detail']}; {drawn}", "6", url, CAUSES["temperature"])]
    return [first, holds(SAMPLING, drawn, "6", url)]


def _after(check: str, url: str, named: str = CAUSES["weights"]) -> Finding:
    return not_tested(check, f"it tells nothing where log-probs are wrong ({named})", url)
