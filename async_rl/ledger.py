"""The on-policy proof of each iteration: no optimizer step without it.

Before a step, `Ledger.require_on_policy` proves from the rows of all data-parallel leaders that

- I1 one version: every response token was sampled from the version this iteration trains;
- I2 exact batch: every prompt of the batch contributed exactly its G responses, once;

and that the trainer's own log-probs of the sampled tokens agree with the rollout's, which no false version claim
survives. Each proof, or what broke it, is one line of `ledger.jsonl`; its `samples` digest is equal in two runs that
trained the same tokens.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from async_rl.errors import OnPolicyViolation
from async_rl.types import Batch, GroupProof, Publication, digest_of

MAX_VIOLATIONS_SHOWN = 8


class Ledger:
    """Checks the rows of an iteration and appends the outcome to a file (one JSON object a line).

    Args:
        path: the ledger file, or None where another rank writes it.
        responses_per_prompt: G, the responses every prompt must contribute.
        max_logprob_gap: largest |trainer - rollout| log-prob in nats that still counts as the same policy.
    """

    def __init__(self, path: Path | None, responses_per_prompt: int, max_logprob_gap: float) -> None:
        self._path = path
        self._responses_per_prompt = responses_per_prompt
        self._max_logprob_gap = max_logprob_gap

    def require_on_policy(self, batch: Batch, publication: Publication, rows: Sequence[GroupProof]) -> None:
        """Proves the batch on-policy and complete, and records the proof.

        Args:
            batch: the whole batch, not a replica's share.
            publication: what this iteration trains.
            rows: the rows of all replicas, in any order.

        Raises:
            OnPolicyViolation: naming every offending row (the first few in the message, all in the ledger file).
        """
        violations = self._violations(batch, publication, rows)
        self._append(batch, publication, rows, violations)
        if violations:
            shown = "\n  ".join(violations[:MAX_VIOLATIONS_SHOWN])
            more = len(violations) - MAX_VIOLATIONS_SHOWN
            raise OnPolicyViolation(
                f"iteration {batch.iteration} is not on-policy; no optimizer step was taken:\n  {shown}"
                + (f"\n  and {more} more, see the ledger" if more > 0 else "")
            )

    def _violations(self, batch: Batch, publication: Publication, rows: Sequence[GroupProof]) -> list[str]:
        found: list[str] = []
        counts = Counter(row.index for row in rows)
        for index, prompt in sorted(batch.prompts.items()):
            if counts[index] != 1:
                found.append(
                    f"group {index} (prompt {prompt.prompt_id!r}) was trained {counts[index]} times, expected 1"
                )
        for row in sorted(rows, key=lambda row: row.index):
            found += self._row_violations(row, batch, publication)
        return found

    def _row_violations(self, row: GroupProof, batch: Batch, publication: Publication) -> list[str]:
        name = f"group {row.index} (prompt {row.prompt_id!r})"
        prompt = batch.prompts.get(row.index)
        if prompt is None:
            return [f"{name} is not part of the batch of {len(batch.prompts)} prompts"]
        found: list[str] = []
        if prompt.prompt_id != row.prompt_id:
            found.append(f"{name} stands in for prompt {prompt.prompt_id!r}")
        if row.num_responses != self._responses_per_prompt:
            found.append(f"{name} has {row.num_responses} responses, expected {self._responses_per_prompt}")
        if row.versions != (publication.version,):
            found.append(
                f"{name} has weight versions {list(row.versions)}, but {publication.version!r} is training: "
                "drain the instance that sampled it before publishing"
            )
        if not row.max_logprob_gap <= self._max_logprob_gap:  # also catches nan
            found.append(
                f"{name} has a log-prob gap of {row.max_logprob_gap:.3g} nats between trainer and rollout, allowed is "
                f"{self._max_logprob_gap:.3g}: the instance holds other weights, another temperature or dtype"
            )
        return found

    def _append(
        self, batch: Batch, publication: Publication, rows: Sequence[GroupProof], violations: Sequence[str]
    ) -> None:
        if self._path is None:
            return
        ordered = sorted(rows, key=lambda row: row.index)
        gap = max((row.max_logprob_gap for row in rows), default=0.0)
        record = {
            "iteration": batch.iteration,
            "weight_version": publication.version,
            "fingerprint": publication.fingerprint,
            "on_policy": not violations,
            "num_groups": len(rows),
            "num_responses": sum(row.num_responses for row in rows),
            "num_response_tokens": sum(row.num_response_tokens for row in rows),
            "num_continued": sum(row.num_continued for row in rows),
            "num_resampled": sum(row.num_resampled for row in rows),
            "samples": digest_of([row.samples for row in ordered]),
            "versions": sorted({version for row in rows for version in row.versions}),
            "max_logprob_gap": gap if math.isfinite(gap) else None,
            "prompt_ids": [row.prompt_id for row in ordered],
            "violations": list(violations),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
