"""One record per iteration -> `metrics.jsonl`, TensorBoard events and the log; its size does not grow with the batch.

All times are seconds. `wait_s` is how long the trainer waited for rollouts, `train_s` the time of its forward and
backward passes; the rollouts' times are those of the replica that writes the record, the rest is over the batch.
Figures that are not finite are null. Each group has a row in `timeline.jsonl`; `samples.jsonl` has the text of a few.

`untrained_groups` is the share of groups whose rewards give no gradient, for which no backward pass was run;
`skipped_steps` counts the steps that were not taken because the gradient was not finite. Means over rewards, responses'
tokens, turns and branches are means over rollouts, which have one reward each; `reward/LABEL` is that of a part of a
composed reward, before its weight, over the rollouts that it scored. All figures are of trained groups, except
`num_left_out`, the groups that dynamic sampling left out, and `reward_mean_drawn`, over both.
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

from async_rl.errors import ConfigError
from async_rl.files import append_lines
from async_rl.proof.logprob_gaps import LogprobGaps
from async_rl.tracking.balance import NUM_RECENT, IterationTimes, advise, desired_instances
from async_rl.tracking.samples import SAMPLES, Decode, Sampled
from async_rl.tracking.tensorboard import ScalarFile
from async_rl.tracking.timeline import TIMELINE, GroupTimes, timeline_rows
from async_rl.types import CorrectAt, Group, GroupProof, Publication, StepStats, num_correct, part_of, reward_part_means

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
        self.left_out: list[GroupProof] = []
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
        """Notes a step, taken or skipped, and the proof of its groups, and of those that were left out."""
        self.rows += [row for row in rows if row.is_trained]
        self.left_out += [row for row in rows if not row.is_trained]
        self.steps.append(stats)


class Recorder:
    """Writes the records of a run; on ranks without a `run_dir` it only measures times.

    Args:
        run_dir: directory for the files and `tensorboard/`, or None where another rank writes them.
        iterations: how many iterations the run has, for progress.
        first_iteration: where it resumes; earlier records stay.
        on_record: called with every record that is written.
        correct_at: which responses are correct; None, and no accuracy, if the reward does not define it.
        decode: makes text of a prompt's tokens, for the samples.
        require_lease: called right before each write; raises if another trainer writes the files by now.
        has_reserve: whether batches have a reserve, of which some groups are left out.
    """

    def __init__(
        self,
        run_dir: Path | None,
        iterations: int,
        first_iteration: int = 0,
        on_record: Callable[[Mapping[str, Any]], None] | None = None,
        correct_at: CorrectAt = None,
        decode: Decode | None = None,
        require_lease: Callable[[], None] = lambda: None,
        *,
        has_reserve: bool = False,
    ) -> None:
        self._require_lease = require_lease
        self._has_reserve = has_reserve
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
        """Writes the groups of a mini-batch; before its proof, so that they can be inspected if that fails."""
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
        samples = list(record.sampled.rows(self._decode, record.rows))
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
        figures = {
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
            **reward_part_means(row.reward_parts for row in rows),
            **self._accuracy(rows),
            **_part_figures(rows),
            **(_selection_figures(rows, record.left_out) if self._has_reserve else {}),
            "response_tokens_mean": response_tokens / len(rewards),
            **_rollout_figures(rows),
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "tokens_per_s": (prompt_tokens + response_tokens) / seconds,
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
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
        if taken := sorted(stats.metrics.keys() & figures.keys()):
            raise ConfigError(
                f"the algorithm has metrics called {', '.join(taken)}, as figures of every record are: give them other "
                "names in its loss_sum()"
            )
        return {**figures, **stats.metrics}

    def _accuracy(self, rows: Sequence[GroupProof]) -> dict[str, float]:
        """Over the rollouts for which it is defined, if it is for any."""
        judged = [(num_correct(self._correct_at, row.rewards, row.reward_parts), row.num_rollouts) for row in rows]
        total = sum(size for correct, size in judged if correct is not None)
        return {"accuracy": sum(correct for correct, _ in judged if correct is not None) / total} if total else {}


def _part_figures(rows: Sequence[GroupProof]) -> dict[str, float]:
    """The mean reward of each part of a mixture that the batch has."""
    rewards: dict[str, list[float]] = {}
    for row in rows:
        rewards.setdefault(part_of(row.prompt_id), []).extend(row.rewards)
    return {f"reward_mean/{part}": statistics.fmean(rewards[part]) for part in sorted(rewards) if part}


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


def _selection_figures(rows: Sequence[GroupProof], left_out: Sequence[GroupProof]) -> dict[str, float]:
    """How many groups the selection left out, and the mean reward of those and the trained ones."""
    rewards = [reward for row in (*rows, *left_out) for reward in row.rewards]
    return {"num_left_out": len(left_out), "reward_mean_drawn": statistics.fmean(rewards)}


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
