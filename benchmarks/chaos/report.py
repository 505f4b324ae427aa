"""The figures of `benchmarks.chaos`, counted from the records of the two runs."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from async_rl.method.proof.prompt_ids import from_runs
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.trainer_run import PROMPTS_PER_BATCH, RESPONSES_PER_PROMPT, Outcome

MUST_BE_ZERO = ("groups_lost", "groups_duplicated", "off_policy_tokens_trained", "hangs", "trainers_failed")
MUST_HOLD = ("weights_equal", "samples_equal")


def report(iterations: int, log: FaultLog, hurt: Outcome, calm: Outcome) -> dict[str, Any]:
    """All metrics; `calm` is the run without faults."""
    first_difference = _first_difference(hurt, calm)
    return {
        "iterations": len(hurt.records),
        "faults": log.num_faults,
        "kills": log.count("kill"),
        "restarts": log.count("restart"),
        "quick_restarts": log.count("quick restart"),
        "joins": log.count("join"),
        "stalls": log.count("stall"),
        "slowdowns": log.count("slow"),
        "cuts": log.count("cut", "silence"),
        "drains": log.count("drain"),
        "removals": log.count("remove"),
        "outages": log.count("outage"),
        "trainer_kills": log.count("trainer kill"),
        "producer_kills": log.count("producer kill"),
        "worker_kills": log.count("worker kill"),
        "worker_stalls": log.count("worker stall"),
        "duplicates_injected": log.count("duplicate", "late duplicate"),
        "version_lies_injected": log.count("lie", "false weight info"),
        "late_answers_injected": log.count("hold"),
        "refusals_injected": log.count("refuse"),
        "resets_injected": log.count("reset"),
        "truncations_injected": log.count("truncate", "tear"),
        "most_faults_in_an_iteration": log.most_between(hurt.times_s),
        **_groups(iterations, hurt),
        "hangs": hurt.num_hangs + calm.num_hangs,
        "trainers_failed": sum(run.exit_code != 0 for run in (hurt, calm)),
        "recovered": log.num_before(hurt.times_s[-1]) if hurt.times_s else 0,
        "slowest_iteration_s": round(max((b - a for a, b in pairwise(hurt.times_s)), default=0.0), 1),
        "responses_continued": sum(proof["num_continued"] for proof in hurt.proofs),
        "responses_resampled": sum(proof["num_resampled"] for proof in hurt.proofs),
        "turns": sum(proof["num_turns"] for proof in hurt.proofs),
        "branches": sum(proof["num_branches"] for proof in hurt.proofs),
        "truncated": sum(proof["num_truncated"] for proof in hurt.proofs),
        "rollouts_repeated": sum(record["num_repeats"] for record in hurt.rollouts),
        "mean_length_with_faults": _mean_length(hurt),
        "mean_length_without": _mean_length(calm),
        "weights_equal": _same_weights(hurt.model_file, calm.model_file),
        "samples_equal": first_difference is None,
        "first_difference": first_difference,
        "seconds": round(hurt.seconds, 1),
        "seconds_without": round(calm.seconds, 1),
    }


def is_sound(figures: dict[str, Any]) -> bool:
    """Whether the run lost nothing, trained only correct tokens, and has the same result as the run without faults."""
    return not any(figures[key] for key in MUST_BE_ZERO) and all(figures[key] for key in MUST_HOLD)


def _groups(iterations: int, run: Outcome) -> dict[str, int]:
    """The groups trained according to the ledger, compared with those that each iteration should have."""
    counts = [Counter(from_runs(proof["prompt_ids"])) for proof in run.proofs]
    wrong = [proof for proof in run.proofs if not proof["on_policy"] or proof["versions"] != [proof["weight_version"]]]
    short = [proof for proof in run.proofs if _num_rollouts(proof) != PROMPTS_PER_BATCH * RESPONSES_PER_PROMPT]
    return {
        "groups_expected": iterations * PROMPTS_PER_BATCH,
        "groups_trained": sum(count.total() for count in counts),
        "groups_lost": iterations * PROMPTS_PER_BATCH - sum(len(count) for count in counts) + len(short),
        "groups_duplicated": sum(count.total() - len(count) for count in counts),
        "off_policy_tokens_trained": sum(proof["num_response_tokens"] for proof in wrong),
    }


def _mean_length(run: Outcome) -> float | None:
    num_rollouts = sum(_num_rollouts(proof) for proof in run.proofs)
    num_tokens = sum(proof["num_response_tokens"] for proof in run.proofs)
    return round(num_tokens / num_rollouts, 3) if num_rollouts else None


def _num_rollouts(proof: dict[str, Any]) -> int:
    return int(proof["num_responses"] - proof["num_branches"])


def _first_difference(hurt: Outcome, calm: Outcome) -> int | None:
    """The first iteration whose samples or published weights differ, or which only one of the runs has."""
    number = max(len(hurt.proofs), len(calm.proofs))
    for i in range(number):
        if i >= min(len(hurt.proofs), len(calm.proofs)):
            return i
        if any(hurt.proofs[i][key] != calm.proofs[i][key] for key in ("samples", "fingerprint", "prompt_ids")):
            return i
    return None


def _same_weights(a: Path, b: Path) -> bool:
    if not (a.exists() and b.exists()):
        return False
    ours, theirs = load_file(a), load_file(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
