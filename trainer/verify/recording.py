"""Iterations as `async-rl run` trains them, whose groups are recorded and whose instances are diagnosed.

`__main__.py` puts these around the objects of a session. What is found of the instances is in `instances.json` of the
run's directory, rewritten in each iteration before the ledger judges it: a batch that fails there is diagnosed, too.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from async_rl.errors import PublishError
from async_rl.loop import RolloutSource, Window
from async_rl.method.group_proof import GroupProof
from async_rl.method.ledger import gaps_by_instance
from async_rl.method.proof.gap_limits import MIN_TOKENS, NoiseLimits
from async_rl.method.proof.logprob_gaps import LogprobGaps
from async_rl.method.selection.finished_groups import FinishedGroups
from async_rl.method.step_stats import StepStats
from async_rl.method.training_order import TrainingOrder
from async_rl.method.types import Batch, Group, Publication, WeightVersion
from async_rl.producer.client import Control
from async_rl.shared.files import write_file
from trainer.rank import TrainingRank
from trainer.verify.diagnosis import Diagnosis
from trainer.verify.recorded_groups import write_share

INSTANCES = "instances.json"
NOT_IN_SERVICE = "not_in_service.json"

Diagnose = Callable[[Sequence[Group]], Mapping[str, Diagnosis]]
"""A collective: (the finished groups of this rank's replica, none on other ranks than leaders) -> by instance."""


class RecordingRolloutSource:
    """The rollouts of one leader; writes the groups of each batch that was trained.

    `directory` is None on ranks that make no rollouts. `groups` are those of the present batch so far.
    """

    def __init__(self, rollouts: RolloutSource, directory: Path | None, replica: int) -> None:
        self._rollouts = rollouts
        self._directory = directory
        self._replica = replica
        self.groups: list[Group] = []

    @contextmanager
    def start(self, mini_batches: Sequence[Batch], version: WeightVersion) -> Iterator[FinishedGroups]:
        self.groups = []
        with self._rollouts.start(mini_batches, version) as finished:
            yield _Recorded(finished, self.groups)
        if self._directory is not None:
            write_share(self._directory, self._replica, Batch.union(mini_batches), version, self.groups)


class _Recorded:
    """Notes the groups that pass."""

    def __init__(self, finished: FinishedGroups, groups: list[Group]) -> None:
        self._finished = finished
        self._groups = groups

    def ready(self, wait: bool) -> list[Group]:
        groups = self._finished.ready(wait)
        self._groups += groups
        return groups

    def begin(self, groups: Sequence[Group]) -> None:
        self._finished.begin(groups)

    def cancel(self, indices: Collection[int]) -> None:
        self._finished.cancel(indices)


class Findings:
    """What the log-probs of all batches so far say of each instance, and of its batches the worst diagnosis; written by
    the main rank."""

    def __init__(self, run_dir: Path, limits: NoiseLimits) -> None:
        self._path = run_dir / INSTANCES
        self._limits = limits
        self._gaps: dict[str, LogprobGaps] = {}
        self._diagnoses: dict[str, Diagnosis] = {}

    def add(self, of_batch: Mapping[str, LogprobGaps], diagnoses: Mapping[str, Diagnosis]) -> None:
        for url, gaps in of_batch.items():
            self._gaps[url] = LogprobGaps.total([self._gaps.get(url, LogprobGaps()), gaps])
        self._diagnoses |= {url: found for url, found in diagnoses.items() if not self._stays(url, found)}

    def write(self) -> None:
        write_file(self._path, json.dumps({url: self._of(url) for url in self._gaps.keys() | self._diagnoses.keys()}))

    def _stays(self, url: str, found: Diagnosis) -> bool:
        """Whether an earlier diagnosis stays: what follows a fault may be its consequence."""
        earlier = self._diagnoses.get(url)
        if earlier is None or earlier.score_sigmas is None:
            return False
        if earlier.cause is not None or found.score_sigmas is None:
            return True
        return found.cause is None and abs(found.score_sigmas) <= abs(earlier.score_sigmas)

    def _of(self, url: str) -> dict[str, Any]:
        gaps = self._gaps.get(url, LogprobGaps())
        diagnosis = self._diagnoses.get(url)
        return {
            **gaps.figures(),
            "num_bad": gaps.num_bad,
            "least_tokens": MIN_TOKENS,
            "largest_rms": 0.0 if self._limits.exact else self._limits.largest_rms(max(gaps.count, 1)),
            "excesses": self._limits.excesses(f"instance {url}", gaps),
            "diagnosis": asdict(diagnosis) if diagnosis is not None else None,
        }


class RecordingRank:
    """The loop's `Trainer`: a training rank that looks at the instances after each publish and before each proof."""

    def __init__(
        self,
        rank: TrainingRank,
        rollouts: RecordingRolloutSource,
        instances: Collection[str],
        diagnose: Diagnose,
        limits: NoiseLimits,
        run_dir: Path,
        control: Control | None,
    ) -> None:
        """Args:
        instances: the URLs that all must serve.
        control: on the main rank, which writes.
        """
        self._rank = rank
        self._rollouts = rollouts
        self._instances = instances
        self._diagnose = diagnose
        self._run_dir = run_dir
        self._control = control
        self._findings = Findings(run_dir, limits)
        self._is_first_part = True

    @property
    def dp_rank(self) -> int:
        return self._rank.dp_rank

    @property
    def num_replicas(self) -> int:
        return self._rank.num_replicas

    def publish_weights(self) -> Publication:
        """
        Raises:
            PublishError: an instance does not serve; the reasons are in `not_in_service.json`.
        """
        serving: Sequence[str] = ()
        try:
            publication = self._rank.publish_weights()
            serving = publication.instances
        finally:
            missing = sorted(set(self._instances) - set(serving))
            if missing and self._control is not None:
                reasons = {url: reason for url, reason in self._control.call("members") if url in missing}
                write_file(self._run_dir / NOT_IN_SERVICE, json.dumps(reasons))
        if missing:
            raise PublishError(f"these instances do not serve: {', '.join(missing)}; see {NOT_IN_SERVICE}")
        self._is_first_part = True
        return publication

    def windows(self, order: TrainingOrder) -> Iterator[Window]:
        return self._rank.windows(order)

    def accumulate(self, window: Window) -> list[GroupProof]:
        return self._rank.accumulate(window)

    def gather(self, rows: Sequence[GroupProof]) -> list[GroupProof]:
        """Diagnoses the instances in every iteration: one that is sound in the first may not be in the next."""
        gathered = self._rank.gather(rows)
        # After the first step of several of a batch the weights are not those that sampled.
        diagnoses = self._diagnose(self._rollouts.groups) if self._is_first_part else {}
        self._findings.add(gaps_by_instance(gathered), diagnoses)
        if self._control is not None:
            self._findings.write()
        return gathered

    def optimizer_step(self) -> StepStats:
        self._is_first_part = False
        return self._rank.optimizer_step()
