"""The on-policy proof of each iteration: without it, no optimizer step.

Before a step, `Ledger.require_on_policy` proves from the rows of all data-parallel leaders that

- I1 one version: every response token was sampled from the version this iteration trains;
- I2 exact batch: every prompt of the batch contributed exactly its G rollouts, once; of a batch with a reserve, every
  prompt that the rewards select (`selection/proof.py`).

Both are strict. It also compares the trainer's log-probs of the sampled tokens with the rollout's: every token must
have both, and noise must explain the differences (`gap_limits.py`). That check is statistical: it finds wrong weights
that differ by enough, over enough tokens. So is the next: that the tokens were drawn from the distribution whose
log-probs came with them (`draws.py`). Each proof, or its violations, is one line of `ledger.jsonl`, whose length does
not grow with the batch; its `samples` digest is equal in two runs that trained the same tokens. `timeline.jsonl` has
the rows.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from async_rl.errors import OnPolicyViolation
from async_rl.method.group_proof import GroupProof
from async_rl.method.proof.draws import Draws
from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits, Unit, unjudged
from async_rl.method.proof.logprob_gaps import MIXED, LogprobGaps
from async_rl.method.proof.prompt_ids import as_runs, digest_of_ids
from async_rl.method.selection.proof import selection_record, selection_violations
from async_rl.method.types import Batch, Publication, digest_of
from async_rl.shared.files import append_lines

log = logging.getLogger(__name__)

MAX_VIOLATIONS_SHOWN = 8
"""In the error message."""

MAX_VIOLATIONS_KEPT = 100
"""In the file; a batch may have as many as it has groups."""

MAX_VERSIONS_KEPT = 16
"""A batch that passes has one."""


class Ledger:
    """Checks the rows of an iteration and appends the outcome to a file (one JSON object a line).

    Args:
        path: the ledger file, or None where another rank writes it.
        responses_per_prompt: G, the rollouts every prompt must contribute.
        limits: which log-prob differences noise explains.
        require_lease: called right before each write; raises if another trainer writes the file by now.
    """

    def __init__(
        self,
        path: Path | None,
        responses_per_prompt: int,
        limits: NoiseLimits,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._require_lease = require_lease
        self._responses_per_prompt = responses_per_prompt
        self._limits = limits
        self._draws = self._draws_before = Draws()
        """Those before the last mini-batch that was counted, too."""
        self._counted: tuple[int, int] | None = None
        """Its iteration and first index."""
        self._has_warned = False

    def require_on_policy(
        self, batch: Batch, publication: Publication, rows: Sequence[GroupProof], num_replicas: int = 1
    ) -> None:
        """Proves the batch on-policy and complete, and records the proof.

        Args:
            batch: the whole batch, not a replica's share.
            publication: the weights that this iteration trains.
            rows: the rows of all replicas, in any order; those of groups that a selection left out, too.
            num_replicas: how many leaders the batch was shared among.

        Raises:
            OnPolicyViolation: names the violating rows (the first few in the message, more of them in the ledger file).
        """
        by_instance = gaps_by_instance(rows)
        trained = [row for row in rows if row.is_trained]
        self._begin_draws(batch)
        self._draws.add(by_instance, math.comb(len(batch.prompts), len(trained)) if batch.has_reserve else 1)
        violations = self._violations(batch, publication, rows, num_replicas, by_instance)
        selection = {"selection": selection_record(batch, num_replicas, rows)} if batch.has_reserve else {}
        self._append(batch, publication, trained, by_instance, violations, selection)
        if violations:
            shown = "\n  ".join(violations[:MAX_VIOLATIONS_SHOWN])
            more = len(violations) - MAX_VIOLATIONS_SHOWN
            raise OnPolicyViolation(
                f"iteration {batch.iteration} is not on-policy; no optimizer step was taken:\n  {shown}"
                + (f"\n  and {more} more, see ledger.jsonl and timeline.jsonl" if more > 0 else "")
            )

    def _begin_draws(self, batch: Batch) -> None:
        """A mini-batch that is proven again, as its iteration begins anew with another producer, is counted once."""
        of_batch = batch.iteration, min(batch.prompts)
        if of_batch == self._counted:
            self._draws = self._draws_before
        self._counted, self._draws_before = of_batch, deepcopy(self._draws)

    def _violations(
        self,
        batch: Batch,
        publication: Publication,
        rows: Sequence[GroupProof],
        num_replicas: int,
        by_instance: Mapping[str, LogprobGaps],
    ) -> list[str]:
        found: list[str] = []
        if batch.has_reserve:
            found += selection_violations(batch, num_replicas, rows)
        else:
            found += _not_trained_once(batch, rows)
        for row in sorted(rows, key=lambda row: row.index):
            found += self._row_violations(row, batch, publication)
        return found + self._deviations(rows, by_instance)

    def _deviations(self, rows: Sequence[GroupProof], by_instance: Mapping[str, LogprobGaps]) -> list[str]:
        """Violations that the log-probs show, for the batch or an instance."""
        found = self._limits.outliers([Unit(url, gaps) for row in rows for url, gaps in row.gaps])
        for instance, gaps in by_instance.items():
            found += self._limits.excesses(_named(instance), gaps)
        found += self._limits.excesses("the batch", LogprobGaps.total(by_instance.values()))
        return found + self._draws.violations

    def _row_violations(self, row: GroupProof, batch: Batch, publication: Publication) -> list[str]:
        name = f"group {row.index} (prompt {row.prompt_id!r})"
        prompt = batch.prompts.get(row.index)
        if prompt is None:
            return [f"{name} is not part of the batch of {len(batch.prompts)} prompts"]
        found: list[str] = []
        if prompt.prompt_id != row.prompt_id:
            found.append(f"{name} stands in for prompt {prompt.prompt_id!r}")
        if row.num_rollouts != self._responses_per_prompt:
            found.append(f"{name} has {_counted(row)}, expected {self._responses_per_prompt}")
        if len(row.rewards) != row.num_rollouts:
            found.append(f"{name} has {_counted(row)}, but {len(row.rewards)} rewards")
        if row.versions != (publication.version,):
            found.append(
                f"{name} has weight versions {list(row.versions)}, but {publication.version!r} is training: "
                "drain the instance that sampled it before publishing"
            )
        num_compared = sum(gaps.count + gaps.num_bad for _, gaps in row.gaps)
        if row.is_trained and num_compared != row.num_response_tokens:
            found.append(
                f"{name} has {row.num_response_tokens} response tokens, but log-probs of {num_compared} were compared"
            )
        found += [
            f"{name}: {own.num_bad} log-probs are no finite number, of the trainer's or of those of {_named(instance)}"
            for instance, own in row.gaps
            if own.num_bad
        ]
        return found

    def _append(
        self,
        batch: Batch,
        publication: Publication,
        rows: Sequence[GroupProof],
        by_instance: Mapping[str, LogprobGaps],
        violations: Sequence[str],
        selection: Mapping[str, Any],
    ) -> None:
        if self._path is None:
            return
        ordered = sorted(rows, key=lambda row: row.index)
        prompt_ids = [row.prompt_id for row in ordered]
        total = LogprobGaps.total(by_instance.values())
        power = self._power(total, by_instance)
        record = {
            "iteration": batch.iteration,
            "weight_version": publication.version,
            "fingerprint": publication.fingerprint,
            "on_policy": not violations,
            "num_groups": len(rows),
            "num_responses": sum(row.num_responses for row in rows),
            "num_response_tokens": sum(row.num_response_tokens for row in rows),
            "num_turns": sum(row.num_turns for row in rows),
            "num_branches": sum(row.num_branches for row in rows),
            "num_truncated": sum(row.num_truncated for row in rows),
            "num_corrected": sum(row.num_corrected for row in rows),
            "num_continued": sum(row.num_continued for row in rows),
            "num_resampled": sum(row.num_resampled for row in rows),
            "samples": digest_of([row.samples for row in ordered]),
            "versions": sorted({version for row in rows for version in row.versions})[:MAX_VERSIONS_KEPT],
            "max_logprob_gap": total.largest,
            "logprob_gaps": {
                **total.figures(),
                "largest_rms": self._largest_rms(total),
                "unjudged": power,
                "instances": {url: gaps.figures() for url, gaps in by_instance.items()},
            },
            "draws": self._draws.figures(),
            "prompt_ids": as_runs(prompt_ids),
            "prompt_ids_sha256": digest_of_ids(prompt_ids),
            **selection,
            "num_violations": len(violations),
            "violations": list(violations[:MAX_VIOLATIONS_KEPT]),
        }
        line = json.dumps(record)
        self._require_lease()
        append_lines(self._path, [line])

    def _largest_rms(self, total: LogprobGaps) -> float | None:
        """The limit of the batch's RMS; None where no limit applies."""
        limit = self._limits.largest_rms(total.count) if total.count >= MIN_TOKENS else math.inf
        return limit if math.isfinite(limit) else None

    def _power(self, total: LogprobGaps, by_instance: Mapping[str, LogprobGaps]) -> str | None:
        """Why the log-probs of this batch cannot be judged, if so; logged the first time."""
        reason = unjudged(total, by_instance)
        if reason is not None and self._path is not None and not self._has_warned:
            self._has_warned = True
            log.warning("versions and counts are proven, log-probs are not: %s", reason)
        return reason


def _not_trained_once(batch: Batch, rows: Sequence[GroupProof]) -> Iterator[str]:
    counts = Counter(row.index for row in rows if row.is_trained)
    pieces: dict[int, list[str]] = {}
    for row in rows:
        if row.first_rollout is not None:
            pieces.setdefault(row.index, []).append(f"{row.first_rollout}-{row.first_rollout + row.num_rollouts - 1}")
    for index, prompt in sorted(batch.prompts.items()):
        if index in pieces:
            yield (
                f"group {index} (prompt {prompt.prompt_id!r}) was trained in pieces that do not make it up: rollouts "
                f"{', '.join(pieces[index])}, expected each rollout once, from 0 on"
            )
        elif counts[index] != 1:
            yield f"group {index} (prompt {prompt.prompt_id!r}) was trained {counts[index]} times, expected 1"


def gaps_by_instance(rows: Sequence[GroupProof]) -> dict[str, LogprobGaps]:
    """The gaps of a batch's rows, by the instance that sampled the tokens."""
    parts: dict[str, list[LogprobGaps]] = {}
    for row in rows:
        for instance, gaps in row.gaps:
            parts.setdefault(instance, []).append(gaps)
    return {instance: LogprobGaps.total(parts[instance]) for instance in sorted(parts)}


def _named(instance: str) -> str:
    return instance if instance == MIXED else f"instance {instance}"


def _counted(row: GroupProof) -> str:
    """How many responses a group has, without those that are further branches of a rollout."""
    if not row.num_branches:
        return f"{row.num_responses} responses"
    return f"{row.num_rollouts} rollouts ({row.num_responses} responses, {row.num_branches} of them branches)"
