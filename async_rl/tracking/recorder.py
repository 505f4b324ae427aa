"""One record per iteration -> `metrics.jsonl`, TensorBoard events and the log; its size does not grow with the batch.

All times are seconds. `wait_s` is how long the trainer waited for rollouts, `train_s` the time of its forward and
backward passes; the rollouts' times are those of the replica that writes the record, the rest is over the batch.
Figures that are not finite are null. Each group has a row in `timeline.jsonl`; `samples.jsonl` has the text of a few.

`untrained_groups` is the share of groups whose rewards give no gradient, for which no backward pass was run;
`skipped_steps` counts the steps that were not taken because the gradient was not finite. Means over rewards, responses'
tokens, turns and branches are means over rollouts, which have one reward each.
"""

import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_rl.files import append_lines
from async_rl.proof.logprob_gaps import LogprobGaps
from async_rl.tracking.balance import NUM_RECENT, IterationTimes, advise, desired_instances
from async_rl.tracking.samples import SAMPLES, Decode, Sampled
from async_rl.tracking.tensorboard import ScalarFile
from async_rl.tracking.timeline import TIMELINE, GroupTimes, timeline_rows
from async_rl.types import Group, GroupProof, Publication, StepStats

log = logging.getLogger(__name__)


class IterationRecord:
    """Times, groups and steps of the current iteration, on one replica."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.started_s = time.monotonic()
        self.seconds: dict[str, float] = {"publish_s": 0.0, "period_s": 0.0, "step_s": 0.0, "train_s": 0.0}
        self.times: dict[int, GroupTimes] = {}
        self.sampled = Sampled()
        self.rows: list[GroupProof] = []
        self.steps: list[StepStats] = []

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of its body to `seconds[name]`."""
        started = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - started

    @contextmanager
    def training(self, window: Sequence[Sequence[Group]]) -> Iterator[None]:
        """Times the training of a window's micro-batches and notes when each group was rolled out."""
        started = time.monotonic()
        with self.timed("train_s"):
            yield
        groups = [group for micro_batch in window for group in micro_batch]
        for group in groups:
            times = (group.started_s, group.finished_s, started, time.monotonic())
            self.times[group.index] = GroupTimes(group.index, *(round(t - self.started_s, 6) for t in times))
        self.sampled.offer(groups)

    def add_step(self, rows: Sequence[GroupProof], stats: StepStats) -> None:
        """Notes a step, taken or skipped, and the proof of its groups."""
        self.rows += rows
        self.steps.append(stats)


class Recorder:
    """Writes the records of a run; on ranks without a `run_dir` it only measures times.

    Args:
        run_dir: directory for the files and `tensorboard/`, or None where another rank writes them.
        iterations: how many iterations the run has, for progress.
        first_iteration: where it resumes; earlier records stay.
        on_record: called with every record that is written.
        correct_at: the smallest reward of a correct response; None, and no accuracy, if the reward does not define it.
        decode: makes text of a prompt's tokens, for the samples.
        require_lease: called right before each write; raises if another trainer writes the files by now.
    """

    def __init__(
        self,
        run_dir: Path | None,
        iterations: int,
        first_iteration: int = 0,
        on_record: Callable[[Mapping[str, Any]], None] | None = None,
        correct_at: float | None = None,
        decode: Decode | None = None,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_lease = require_lease
        self._run_dir = run_dir
        self._iterations = iterations
        self._on_record = on_record
        self._correct_at = correct_at
        self._decode = decode
        self._recent: deque[IterationTimes] = deque(maxlen=NUM_RECENT)
        self._scalars = ScalarFile(run_dir / "tensorboard", first_iteration) if run_dir else None

    def begin(self, iteration: int) -> IterationRecord:
        return IterationRecord(iteration)

    def write_groups(self, record: IterationRecord, rows: Sequence[GroupProof]) -> None:
        """Writes the trained groups of a mini-batch; before its proof, so that they can be inspected if that fails."""
        if self._run_dir is not None:
            groups = list(timeline_rows(record.iteration, rows, record.times))
            self._require_lease()
            TIMELINE.append(self._run_dir, groups)

    def end(self, record: IterationRecord, publication: Publication) -> None:
        """Completes and writes the record of an iteration that passed its proof and whose steps have finished."""
        if self._run_dir is None or self._scalars is None:
            return
        line = {key: _as_json(value) for key, value in self._summarize(record, publication).items()}
        times = IterationTimes.of(line)
        self._recent.append(times)
        line["idle_training"], line["idle_inference"] = times.idle_training, times.idle_inference
        line["desired_instances"] = desired_instances(self._recent)
        samples = list(record.sampled.rows(self._decode))
        self._require_lease()
        SAMPLES.append(self._run_dir, samples)
        append_lines(self._run_dir / "metrics.jsonl", [json.dumps(line)])
        self._scalars.write(record.iteration, _scalars(line))
        if self._on_record is not None:
            self._on_record(line)
        log.info(
            "iteration %d/%d: reward %.3f, %s%.0f tokens/s, %.2f s (waited %.2f, trained %.2f, published %.2f)",
            record.iteration + 1,
            self._iterations,
            line["reward_mean"],
            f"accuracy {line['accuracy']:.3f}, " if "accuracy" in line else "",
            *(line[key] for key in ("tokens_per_s", "seconds", "wait_s", "train_s", "publish_s")),
        )

    def close(self) -> None:
        """Logs how well the pools were balanced, and closes the files."""
        if self._recent:
            log.info(advise(self._recent))
        if self._scalars:
            self._scalars.close()

    def _summarize(self, record: IterationRecord, publication: Publication) -> dict[str, Any]:
        rows, stats = record.rows, StepStats.mean(record.steps)
        seconds = time.monotonic() - record.started_s
        rewards = [reward for row in rows for reward in row.rewards]
        prompt_tokens = sum(row.num_prompt_tokens for row in rows)
        response_tokens = sum(row.num_response_tokens for row in rows)
        dispatched = min((times.started_s for times in record.times.values()), default=0.0)
        finished = [times.finished_s - dispatched for times in record.times.values()]
        return {
            "iteration": record.iteration,
            "iterations": self._iterations,
            "weight_version": publication.version,
            "seconds": seconds,
            "wait_s": record.seconds["period_s"] - record.seconds["train_s"],
            "train_s": record.seconds["train_s"],
            "publish_s": record.seconds["publish_s"],
            "step_s": record.seconds["step_s"],
            "rollout_s": max(finished, default=0.0),
            "first_group_s": min(finished, default=0.0),
            "reward_mean": statistics.fmean(rewards),
            "reward_std": statistics.pstdev(rewards),
            **self._accuracy(rewards),
            "response_tokens_mean": response_tokens / len(rewards),
            **_rollout_figures(rows),
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "tokens_per_s": (prompt_tokens + response_tokens) / seconds,
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            **stats.metrics,
            "on_policy": True,
            **_gap_figures(rows),
            "num_groups": len(rows),
            "untrained_groups": stats.num_untrained / len(rows),
            "skipped_steps": sum(step.skipped for step in record.steps),
            "retries": sum(row.attempts - 1 for row in rows),
            "num_continued": sum(row.num_continued for row in rows),
            "num_resampled": sum(row.num_resampled for row in rows),
            "num_instances": len(publication.instances),
        }

    def _accuracy(self, rewards: Sequence[float]) -> dict[str, float]:
        if self._correct_at is None:
            return {}
        return {"accuracy": statistics.fmean(reward >= self._correct_at for reward in rewards)}


def _rollout_figures(rows: Sequence[GroupProof]) -> dict[str, float]:
    """Per rollout: turns and branches if any rollout has several, and the share that ended at a limit if any did."""
    num_rollouts, num_turns, num_branches, num_truncated = (
        sum(getattr(row, name) for row in rows)
        for name in ("num_rollouts", "num_turns", "num_branches", "num_truncated")
    )
    figures = {}
    if num_turns > num_rollouts or num_branches:
        figures = {"turns_mean": num_turns / num_rollouts, "branches_mean": num_branches / num_rollouts}
    return figures | ({"truncated_share": num_truncated / num_rollouts} if figures or num_truncated else {})


def _gap_figures(rows: Sequence[GroupProof]) -> dict[str, float]:
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


def _scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record that can be plotted over the iterations."""
    return {
        key: value
        for key, value in line.items()
        if isinstance(value, float | int) and not isinstance(value, bool) and not key.startswith("iteration")
    }


def _as_json(value: Any) -> Any:
    """The value, or None for a number that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
