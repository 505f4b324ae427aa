"""One record per iteration -> `metrics.jsonl`, the trackers and the log; its size does not grow with the batch.

`docs/metrics.md` defines each figure; those that are not finite are null. Each group has a row in `timeline.jsonl`;
`samples.jsonl` has the text of a few.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from async_rl.errors import ConfigError
from async_rl.method.group_proof import GroupProof
from async_rl.method.step_stats import StepStats
from async_rl.method.types import CorrectAt, Group, Publication
from async_rl.records.balance import (
    NUM_RECENT,
    IterationTimes,
    advise,
    desired_instances,
    overlap_bound_s,
    overlap_efficiency,
    remember,
)
from async_rl.records.group_figures import group_figures, selection_figures
from async_rl.records.rotation import SAMPLES, TIMELINE
from async_rl.records.samples import Decode, Sampled
from async_rl.records.throughput import TrainingPool, tpspd
from async_rl.records.timeline import GroupTimes, timeline_rows
from async_rl.records.trackers.fan_out import Trackers
from async_rl.shared.files import append_lines


def queue_figures(times: Collection[GroupTimes]) -> dict[str, float]:
    """The mean wait, and the most groups that waited at the same time; 0 where no group has times."""
    waits = [each.train_started_s - each.finished_s for each in times]
    arrivals = [(each.finished_s, 1) for each in times]
    departures = [(each.train_started_s, -1) for each in times]
    most = waiting = 0
    # A group that arrives when another one leaves has not met it.
    for _, change in sorted(arrivals + departures):
        waiting += change
        most = max(most, waiting)
    return {"queue_wait_s_mean": fmean(waits) if waits else 0.0, "queue_groups_max": most}


log = logging.getLogger(__name__)

T = TypeVar("T")


NUM_UNTRAINED = 10
"""Iterations without any gradient after which that is no chance of the prompts drawn."""


class IterationRecord:
    """Times, groups and steps of the current iteration, on one replica."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.started_s = time.monotonic()
        self.started_unix_s = time.time()
        self.spans: list[tuple[str, float, float]] = []
        self.seconds = dict.fromkeys(("publish_s", "period_s", "step_s", "train_s", "evaluation_s"), 0.0)
        self.times: dict[int, GroupTimes] = {}
        self.rolled_out: list[tuple[float, float]] = []
        """When rollouts of all replicas began and finished, in seconds since the beginning, where that is known."""
        self.sampled = Sampled()
        self.rows: list[GroupProof] = []
        self.left_out: list[GroupProof] = []
        self.steps: list[StepStats] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of its body to `seconds[name]`, and when that was to the spans."""
        started = time.monotonic()
        yield
        ended = time.monotonic()
        self.seconds[name] += ended - started
        since_begin = round(started - self.started_s, 6), round(ended - self.started_s, 6)
        self.spans.append((name.removesuffix("_s"), *since_begin))

    @contextmanager
    def timed_exit(self, name: str, context: AbstractContextManager[T]) -> Iterator[T]:
        """`context`; adds the time of leaving it to `seconds[name]`."""
        with ExitStack() as leaving:
            yield leaving.enter_context(context)
            started = time.monotonic()
            leaving.close()
            self.seconds[name] += time.monotonic() - started

    @contextmanager
    def training(self, window: Sequence[Sequence[Group]]) -> Iterator[None]:
        """Times the training of a window's micro-batches and notes when each group was rolled out."""
        started = time.monotonic()
        yield
        ended = time.monotonic()
        self.seconds["train_s"] += ended - started
        groups = [group for micro_batch in window for group in micro_batch]
        for group in groups:
            times = [round(t - self.started_s, 6) for t in (group.started_s, group.finished_s, started, ended)]
            if (earlier := self.times.get(group.index)) is not None:
                # Of several pieces, the first one's beginning.
                times[2] = earlier.train_started_s
            self.times[group.index] = GroupTimes(group.index, *times)
        self.sampled.offer(groups)

    def as_data(self) -> dict[str, Any]:
        """All but the sampled groups; for `from_data` in another process."""
        return {
            "iteration": self.iteration,
            "seconds_since": time.monotonic() - self.started_s,
            "started_unix_s": self.started_unix_s,
            "spans": self.spans,
            "seconds": self.seconds,
            "times": list(self.times.values()),
            "rows": self.rows,
            "left_out": self.left_out,
            "steps": self.steps,
        }

    @classmethod
    def from_data(
        cls, data: Mapping[str, Any], groups: Iterable[Group] = (), rolled_out: Iterable[tuple[float, float]] = ()
    ) -> "IterationRecord":
        """The record as it was.

        Args:
            groups: those of the iteration that are known here, with their texts.
            rolled_out: when each group of all replicas was begun and finished, on this process's clock.
        """
        record = cls(data["iteration"])
        record.started_s -= data["seconds_since"]
        record.started_unix_s = data["started_unix_s"]
        record.spans = [tuple(span) for span in data["spans"]]
        record.seconds = data["seconds"]
        record.times = {times["index"]: GroupTimes(**times) for times in data["times"]}
        record.rows = [GroupProof.from_json(row) for row in data["rows"]]
        trained = {row.index for row in record.rows}
        record.sampled.offer(group for group in groups if group.index in trained)
        record.rolled_out = [(began - record.started_s, ended - record.started_s) for began, ended in rolled_out]
        record.left_out = [GroupProof.from_json(row) for row in data["left_out"]]
        record.steps = [StepStats(**step) for step in data["steps"]]
        return record

    def add_step(self, rows: Sequence[GroupProof], stats: StepStats) -> None:
        """Notes a step, taken or skipped, and the proof of its groups, and of those that were left out."""
        self.rows += [row for row in rows if row.is_trained]
        self.left_out += [row for row in rows if not row.is_trained]
        self.steps.append(stats)


class Recorder:
    """Measures times and writes nothing: of the ranks beside the main one."""

    def begin_iteration(self, iteration: int) -> IterationRecord:
        return IterationRecord(iteration)

    def write_groups(self, record: IterationRecord, rows: Sequence[GroupProof]) -> None:
        """Writes the groups of a mini-batch; before its proof, so that they can be inspected if that fails."""

    def end_iteration(self, record: IterationRecord, publication: Publication) -> None:
        """Completes and writes the record of an iteration that passed its proof and whose steps have finished."""

    def keep_unwritten(self, record: IterationRecord, publication: Publication) -> None:
        """The iteration is whole, but its record could not be written: by default it is lost."""

    def close(self) -> None:
        """Ends the records of the run."""


class RunRecorder(Recorder):
    """Writes the records of a run.

    Args:
        run_dir: directory for the files.
        iterations: how many iterations the run has, for progress.
        on_record: called with every record that is written.
        correct_at: which responses are correct; None, and no accuracy, if the reward does not define it.
        decode: makes text of a prompt's tokens, for the samples.
        require_lease: called right before each write; raises if another trainer writes the files by now.
        has_reserve: whether batches have a reserve, of which some groups are left out.
        training_pool: what throughput per device depends on; without it such figures are null.
        trackers: get each record and its samples, too. Their owner closes them.
        all_responses: samples have the texts of all responses of their groups.
        takes_turns: the pools never work at the same time: no number of instances balances them.
    """

    def __init__(
        self,
        run_dir: Path,
        iterations: int,
        on_record: Callable[[Mapping[str, Any]], None] | None = None,
        correct_at: CorrectAt = None,
        decode: Decode | None = None,
        require_lease: Callable[[], None] = lambda: None,
        *,
        has_reserve: bool = False,
        training_pool: TrainingPool | None = None,
        trackers: Trackers | None = None,
        all_responses: bool = False,
        takes_turns: bool = False,
    ) -> None:
        self._all_responses = all_responses
        self._takes_turns = takes_turns
        self._trackers = trackers or Trackers()
        self._training_pool = training_pool
        self._require_lease = require_lease
        self._has_reserve = has_reserve
        self._run_dir = run_dir
        self._iterations = iterations
        self._on_record = on_record
        self._correct_at = correct_at
        self._decode = decode
        self._history: list[IterationTimes] = []
        self._num_untrained = 0
        """Iterations in a row in which no group had a gradient."""

    def write_groups(self, record: IterationRecord, rows: Sequence[GroupProof]) -> None:
        groups = list(timeline_rows(record.iteration, rows, record.times))
        self._require_lease()
        TIMELINE.append(self._run_dir, groups)

    def end_iteration(self, record: IterationRecord, publication: Publication) -> None:
        line = {key: _as_json(value) for key, value in self._summarize(record, publication).items()}
        samples = list(record.sampled.rows(self._decode, record.rows, all_responses=self._all_responses))
        self._require_lease()
        SAMPLES.append(self._run_dir, samples)
        append_lines(self._run_dir / "metrics.jsonl", [json.dumps(line)])
        self._trackers.log_record(line)
        self._trackers.log_samples(record.iteration, samples)
        if self._on_record is not None:
            self._on_record(line)
        self._note_gradient(line)
        log.info(
            "iteration %d, %d/%d done: reward %.3f, %s%.0f tokens/s, %.2f s (waited %.2f, trained %.2f, publish %.2f)",
            record.iteration,
            record.iteration + 1,
            self._iterations,
            line["reward_mean"],
            f"accuracy {line['accuracy']:.3f}, " if "accuracy" in line else "",
            *(line[key] for key in ("tokens_per_s", "seconds", "wait_s", "train_s", "publish_s")),
        )

    def close(self) -> None:
        """Logs how well the pools were balanced."""
        if self._history:
            log.info(advise(self._history[-NUM_RECENT:], self._desired_instances()))

    def _note_gradient(self, line: Mapping[str, Any]) -> None:
        """Warns when nothing has been learned for a while: the run goes on, as later prompts may be others."""
        self._num_untrained = self._num_untrained + 1 if line["untrained_groups"] >= 1.0 else 0
        if self._num_untrained == NUM_UNTRAINED:
            log.warning(
                "no group of the last %d iterations had a gradient, so nothing is learned: all responses to a prompt "
                "get the same reward (mean %.3f; %.0f%% of the responses were cut off at a limit). Read some: async-rl "
                "samples %s. If none is right, give easier prompts, more tokens, or a reward with steps in between; if "
                "all are, harder prompts",
                NUM_UNTRAINED,
                line["reward_mean"],
                100 * line["truncated_share"],
                self._run_dir,
            )

    def _summarize(self, record: IterationRecord, publication: Publication) -> dict[str, Any]:
        rows, stats = record.rows, StepStats.mean(record.steps)
        figures = {
            "iteration": record.iteration,
            "iterations": self._iterations,
            "weight_version": publication.version,
            "started_unix_s": record.started_unix_s,
            **_time_figures(record),
            "canary_s": publication.canary_s,
            "publish_bytes": publication.num_bytes,
            **group_figures(rows, self._correct_at),
            **(selection_figures(rows, record.left_out) if self._has_reserve else {}),
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "on_policy": True,
            "untrained_groups": stats.num_untrained / len(rows),
            "skipped_steps": sum(step.skipped for step in record.steps),
            "memory_peak_bytes": stats.memory_peak_bytes,
            "device_memory_peak_bytes": stats.device_memory_peak_bytes,
            "num_instances": len(publication.instances),
            "spans": record.spans,
        }
        figures |= self._throughput(figures, rows, stats.num_untrained, publication.num_workers)
        figures |= self._balance(figures, record.spans)
        if taken := sorted(stats.metrics.keys() & figures.keys()):
            raise ConfigError(
                f"the algorithm has metrics called {', '.join(taken)}, as figures of every record are: give them other "
                "names in its loss_sum()"
            )
        return {**figures, **stats.metrics}

    def _throughput(
        self, figures: Mapping[str, Any], rows: Sequence[GroupProof], num_untrained: int, num_inference: int | None
    ) -> dict[str, Any]:
        pool, seconds = self._training_pool, figures["seconds"]
        num_tokens = figures["prompt_tokens"] + figures["response_tokens"]
        num_training = pool.num_devices if pool else None
        model_flops = pool.model_flops(rows, num_untrained) if pool else None
        return {
            "num_training_devices": num_training,
            "num_inference_devices": num_inference,
            "tokens_per_s": num_tokens / seconds,
            "tpspd": tpspd(num_tokens, seconds, num_training, num_inference),
            "model_flops": model_flops,
            "mfu": pool.mfu(model_flops, figures["train_s"]) if pool else None,
        }

    def _balance(self, line: Mapping[str, Any], spans: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
        """How well this iteration's pools overlapped, and how many instances would balance the recent ones."""
        times = IterationTimes.of(line)
        remember(self._history, times)
        bound_s = overlap_bound_s(
            **{name: line[name] for name in ("publish_s", "rollout_s", "train_s", "step_s")},
            last_step_s=next((ended - started for name, started, ended in reversed(spans) if name == "step"), 0.0),
        )
        return {
            "overlap_bound_s": bound_s,
            "overlap_efficiency": overlap_efficiency(bound_s, line["seconds"] - line["evaluation_s"]),
            "idle_training": times.idle_training,
            "idle_inference": times.idle_inference,
            "desired_instances": self._desired_instances(),
        }

    def _desired_instances(self) -> int | None:
        return None if self._takes_turns else desired_instances(self._history)


def _time_figures(record: IterationRecord) -> dict[str, float]:
    """Those of queues are of the replica that writes the record."""
    of_replica = [(times.started_s, times.finished_s) for times in record.times.values()]
    rolled_out = record.rolled_out or of_replica
    dispatched = min((started_s for started_s, _ in rolled_out), default=0.0)
    finished = [finished_s - dispatched for _, finished_s in rolled_out]
    return {
        "seconds": time.monotonic() - record.started_s,
        "wait_s": record.seconds["period_s"] - record.seconds["train_s"],
        "train_s": record.seconds["train_s"],
        "publish_s": record.seconds["publish_s"],
        "step_s": record.seconds["step_s"],
        "evaluation_s": record.seconds["evaluation_s"],
        "rollout_s": max(finished, default=0.0),
        "first_group_s": min(finished, default=0.0),
        **queue_figures(record.times.values()),
    }


def _as_json(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
