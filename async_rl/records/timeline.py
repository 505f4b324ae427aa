"""`timeline.jsonl`: one row for each trained group, and for each that a selection left out; `recorder` writes it.

A row has what the ledger checked of the group, so that sums and digests of `ledger.jsonl` can be computed again from
it (`docs/proof.md`), and, if the group was rolled out by the writing replica, when that happened and when it was
trained, in seconds from the start of the iteration. Figures have 6 digits. Rows of a mini-batch are ordered by index.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.types import reward_part_means


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """When the group at `index` was rolled out and trained, in seconds from the start of its iteration."""

    index: int
    started_s: float
    finished_s: float
    train_started_s: float
    train_finished_s: float

    def fields(self) -> dict[str, float]:
        """The result of `asdict`, in a tenth of its time: a batch may have ten thousand."""
        return {name: getattr(self, name) for name in self.__slots__}


def timeline_rows(
    iteration: int, rows: Sequence[GroupProof], times: Mapping[int, GroupTimes]
) -> Iterator[dict[str, Any]]:
    """The rows of the groups of a mini-batch; `times`, by index, may have only some of them."""
    for row in sorted(rows, key=lambda row: row.index):
        yield {
            "iteration": iteration,
            "index": row.index,
            "prompt_id": row.prompt_id,
            **({} if row.is_trained else {"is_trained": False}),
            "versions": row.versions,
            "num_responses": row.num_responses,
            "num_prompt_tokens": row.num_prompt_tokens,
            "num_response_tokens": row.num_response_tokens,
            "longest_rollout_tokens": max(row.rollout_lengths, default=0),
            "reward_mean": _rounded(fmean(row.rewards)) if row.rewards else None,
            **{name: _rounded(mean) for name, mean in reward_part_means([row.reward_parts]).items()},
            "attempts": row.attempts,
            "num_continued": row.num_continued,
            "num_resampled": row.num_resampled,
            "num_turns": row.num_turns,
            "num_branches": row.num_branches,
            "num_truncated": row.num_truncated,
            "num_corrected": row.num_corrected,
            **({} if row.num_pieces == 1 else {"num_pieces": row.num_pieces}),
            "samples": row.samples,
            "logprob_gaps": {instance: _figures(gaps) for instance, gaps in row.gaps},
            **(times[row.index].fields() if row.index in times else {}),
        }


def _figures(gaps: LogprobGaps) -> dict[str, float | None]:
    """The figures behind the ledger's sums and limits; see `LogprobGaps`."""
    figures = {
        "mean": gaps.mean,
        "mean_abs": gaps.mean_abs,
        "rms": gaps.rms,
        "max": gaps.largest,
        "k3": gaps.k3,
        "clipped_mean": gaps.clipped_mean,
        "clipped_rms": gaps.clipped_rms,
    }
    return {
        "tokens": gaps.count,
        "num_bad": gaps.num_bad,
        **{name: _rounded(value) for name, value in figures.items()},
    }


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
