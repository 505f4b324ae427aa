"""Figures of an iteration that follow from its groups: rewards, correctness, lengths, log-prob gaps; for `recorder`.

Pure functions on rows of the proof. `docs/metrics.md` has each figure's definition.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.types import CorrectAt, have_signal, num_correct, part_of, reward_part_means
from async_rl.records.pass_at_k import ks_of, pass_at_k

_EDGES = [0, 1, *sorted(edge for i in range(1, 40) for edge in (2**i, 3 * 2 ** (i - 1)))]
"""Of lengths: two buckets per doubling, the same in every iteration and run, so that histograms can be added."""


def length_figures(lengths: Sequence[int]) -> dict[str, Any]:
    """Of sampled tokens per rollout, at least one; a quantile is the smallest length that so large a share reaches."""
    ascending = sorted(lengths)

    def quantile(share: float) -> int:
        return ascending[max(0, math.ceil(share * len(ascending)) - 1)]

    return {
        "response_tokens_min": ascending[0],
        "response_tokens_p50": quantile(0.5),
        "response_tokens_p90": quantile(0.9),
        "response_tokens_max": ascending[-1],
        "response_tokens_histogram": histogram(ascending),
    }


def histogram(lengths: Sequence[int]) -> list[list[int]]:
    """`[lower, upper, count]` of each bucket from the first to the last that holds a length; `upper` is excluded."""
    counts = Counter(bisect_right(_EDGES, length) - 1 for length in lengths)
    return [[_EDGES[i], _EDGES[i + 1], counts[i]] for i in range(min(counts), max(counts) + 1)]


def group_figures(rows: Sequence[GroupProof], correct_at: CorrectAt) -> dict[str, Any]:
    """Of trained groups, at least one."""
    rewards = [reward for row in rows for reward in row.rewards]
    return {
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        **reward_part_means(row.reward_parts for row in rows),
        **_correctness(rows, correct_at),
        **_part_figures(rows),
        "num_groups": len(rows),
        "num_groups_without_signal": sum(not have_signal(row.rewards) for row in rows),
        **_rollout_figures(rows),
        "prompt_tokens": sum(row.num_prompt_tokens for row in rows),
        "response_tokens": sum(row.num_response_tokens for row in rows),
        **_gap_figures(rows),
        "retries": sum(row.attempts - 1 for row in rows),
        "num_continued": sum(row.num_continued for row in rows),
        "num_resampled": sum(row.num_resampled for row in rows),
    }


def selection_figures(rows: Sequence[GroupProof], left_out: Sequence[GroupProof]) -> dict[str, float]:
    """How many groups the selection left out, and the mean reward of those and the trained ones."""
    rewards = [reward for row in (*rows, *left_out) for reward in row.rewards]
    return {"num_left_out": len(left_out), "reward_mean_drawn": fmean(rewards)}


def _correctness(rows: Sequence[GroupProof], correct_at: CorrectAt) -> dict[str, float]:
    """Over the groups for which it is defined, if it is for any; k up to the rollouts that each of them has."""
    judged = [
        (row.num_rollouts, correct)
        for row in rows
        if (correct := num_correct(correct_at, row.rewards, row.reward_parts)) is not None
    ]
    if not judged:
        return {}
    accuracy = sum(correct for _, correct in judged) / sum(size for size, _ in judged)
    ks = ks_of(min(size for size, _ in judged))[1:]
    return {"accuracy": accuracy} | {
        f"pass@{k}": fmean(pass_at_k(size, correct, k) for size, correct in judged) for k in ks
    }


def _part_figures(rows: Sequence[GroupProof]) -> dict[str, float]:
    """The mean reward of each part of a mixture that the batch has."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        rewards.setdefault(part_of(row.prompt_id), []).extend(row.rewards)
    return {f"reward_mean/{part}": fmean(rewards[part]) for part in sorted(rewards) if part}


def _rollout_figures(rows: Sequence[GroupProof]) -> dict[str, Any]:
    """Per rollout: lengths, the share that ended at a limit, and turns and branches if any rollout has several."""
    num_rollouts, num_turns, num_branches, num_truncated, num_tokens = (
        sum(getattr(row, name) for row in rows)
        for name in ("num_rollouts", "num_turns", "num_branches", "num_truncated", "num_response_tokens")
    )
    figures: dict[str, Any] = {
        "response_tokens_mean": num_tokens / num_rollouts,
        **length_figures([length for row in rows for length in row.rollout_lengths]),
        "truncated_share": num_truncated / num_rollouts,
    }
    if num_turns > num_rollouts or num_branches:
        figures |= {"turns_mean": num_turns / num_rollouts, "branches_mean": num_branches / num_rollouts}
    return figures


def _gap_figures(rows: Sequence[GroupProof]) -> Mapping[str, float]:
    """Trainer - rollout log-probs over the iteration, in nats; see `LogprobGaps`."""
    gaps = LogprobGaps.total(gaps for row in rows for _, gaps in row.gaps)
    return {
        "max_logprob_gap": gaps.largest,
        "logprob_gap_mean": gaps.mean,
        "logprob_gap_mean_abs": gaps.mean_abs,
        "logprob_gap_rms": gaps.rms,
        "logprob_gap_p99": gaps.quantile(0.99),
        "rollout_kl_k1": gaps.k1,
        "rollout_kl_k3": gaps.k3,
    }
