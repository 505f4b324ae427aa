"""The quickstart's `summary.json`: the results of a run, in a few figures that can be checked against its files."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from deploy.cluster.run_view import Record, time_shares

NUM_ENDS = 5
"""Iterations averaged at either end of the run: one batch's mean reward is noisy."""


def summarize(
    metrics: Sequence[Record],
    ledger: Sequence[Record],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    task: str,
    seed: int,
    phases_s: Mapping[str, float],
    cores: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """The summary of a finished run.

    Args:
        metrics: the records of `metrics.jsonl`, one per iteration.
        ledger: the rows of `ledger.jsonl`, one proof per optimizer step.
        before: the record of `evaluate` for the base model.
        after: the same for the trained model.
        task: the quickstart's name.
        seed: the run's seed.
        phases_s: wall seconds of each phase of the quickstart, in their order.
        cores: CPU cores each process was pinned to; empty if not pinned.

    Returns:
        Accuracies are shares of held-out prompts; rewards are means over the first and last `NUM_ENDS` iterations;
        `tokens_per_s` counts prompt and response tokens over the iterations' wall time; `device_split` has the shares
        of that time in which the trainer waited for rollouts, trained and published.
    """
    num_ends = max(1, min(NUM_ENDS, len(metrics) // 2))
    tokens = sum(record["prompt_tokens"] + record["response_tokens"] for record in metrics)
    return {
        "task": task,
        "seed": seed,
        "iterations": len(metrics),
        "seconds": round(sum(phases_s.values()), 1),
        "phases_s": {name: round(seconds, 1) for name, seconds in phases_s.items()},
        "accuracy_before": before["accuracy"],
        "accuracy_after": after["accuracy"],
        "num_held_out": after["num_prompts"],
        "reward_first": round(fmean(record["reward_mean"] for record in metrics[:num_ends]), 4),
        "reward_last": round(fmean(record["reward_mean"] for record in metrics[-num_ends:]), 4),
        "on_policy": is_on_policy(metrics, ledger),
        "max_logprob_gap": max(row["max_logprob_gap"] for row in ledger),
        "num_responses": sum(row["num_responses"] for row in ledger),
        "tokens_per_s": round(tokens / sum(record["seconds"] for record in metrics), 1),
        "device_split": {
            **{name: round(share, 4) for name, share in time_shares(metrics).items()},
            "cores": {name: list(own) for name, own in cores.items()},
        },
    }


def is_on_policy(metrics: Sequence[Record], ledger: Sequence[Record]) -> bool:
    """Whether every iteration has a proof of each of its steps, each holds, and no weight version was trained on in two
    iterations."""
    num_proofs = Counter((row["iteration"], row["weight_version"]) for row in ledger if row["on_policy"])
    iterations, versions = ({key[place] for key in num_proofs} for place in (0, 1))
    is_complete = iterations == {record["iteration"] for record in metrics} and len(set(num_proofs.values())) == 1
    return is_complete and num_proofs.total() == len(ledger) and len(versions) == len(num_proofs) == len(metrics)
