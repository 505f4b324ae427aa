"""The iterations of a run that `async-rl plan` goes by, from its records.

`timeline.jsonl` says when each group was dispatched, finished and trained, and how long its responses are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from async_rl.config.sections import CheckpointSection
from async_rl.config.trainer_section import TrainerSection
from async_rl.errors import ConfigError
from async_rl.records.rotation import TIMELINE
from async_rl.records.run_records import (
    METRICS,
    Record,
    RunRecords,
    has_iteration,
    number_of,
    object_in,
    require_readable,
)
from deploy.scaling.simulation import Schedule, SetUp, Shape

NUM_ITERATIONS = 20
"""The last ones, of which every other one is fitted, and the others are compared."""

FEWEST = 4

LOOKED_BACK = 100
"""Iterations before these, from which it is known how long a prompt's responses were expected to be."""

TOO_LONG = 3.0
"""Times the median of an iteration that has something in it which no cost is of: a start, a wait for an instance."""

SAME = (
    *(("model", "path"), ("model", "dtype"), ("adapter", "rank"), ("algorithm", "name"), ("inference", "engine")),
    *(("trainer", "device"), *(("trainer", name) for name in ("tensor_parallel", "pipeline_parallel"))),
)
"""What several runs that one plan goes by have in common."""

REPLICA = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""Whose product is a replica's ranks."""

PARTS = ("seconds", "publish_s", "step_s", "wait_s", "train_s")
SIZES = ("num_prompt_tokens", "num_response_tokens", "num_responses", "num_turns")
LARGEST, MOST = 2**40, 2**16
"""Tokens and seconds, and responses of a group: beyond it a number is none of a run."""

CHAINED = ("broadcast", "changes", "stages")
"""Transports with which instances pass the weights on."""

TIMES = ("started_s", "finished_s")
WINDOW = ("train_started_s", "train_finished_s")
"""Of groups of other replicas than the one that writes the records there are none."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of an iteration: its sizes, and when it finished, in seconds after the dispatch of the batch; None of one
    that a selection left out."""

    shape: Shape
    finished_s: float | None


class Window(NamedTuple):
    """One of the replica that writes the records, in seconds after the dispatch."""

    rows: int
    start_s: float
    end_s: float

    def shared(self, until_s: float) -> float:
        """The part of its time that is before `until_s`."""
        return min(1.0, max(0.0, until_s - self.start_s) / max(self.end_s - self.start_s, 1e-9))


@dataclass(frozen=True, slots=True)
class Iteration:
    """What the records have of one; groups are in the order of their dispatch.

    `chained_bytes` passed from instance to instance, through each chain if there are several: 0 if none did, or if it
    is not known.
    """

    record: Record
    groups: tuple[Group, ...]
    windows: tuple[Window, ...]
    set_up: SetUp
    chained_bytes: float

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(group.shape for group in self.groups)

    @property
    def rollout_s(self) -> float:
        """When the last trained group finished, in seconds after the dispatch."""
        return max(group.finished_s for group in self.groups if group.finished_s is not None)

    def alone_s(self, at_s: float, factor: float) -> tuple[float, float]:
        """When rollouts that end `at_s` would have ended without training beside them, during which they take `factor`
        times as long; and that factor, or 1, as it is at their end."""
        trained_s = sum(max(0.0, min(at_s, window.end_s) - max(0.0, window.start_s)) for window in self.windows)
        is_beside = any(window.start_s < at_s <= window.end_s for window in self.windows)
        return at_s - (1 - 1 / factor) * trained_s, factor if is_beside else 1.0


def set_up_of(run_dir: Path) -> tuple[SetUp, int, int]:
    """Of a run's config.json, but for the numbers of instances and replicas; the devices of a replica; and how many
    chains the weights go through, or 0."""
    require_readable(run_dir, ["config.json", METRICS, TIMELINE.name])
    config = object_in(run_dir / "config.json")
    try:
        sizes = [config["trainer"][name] for name in REPLICA]
        max_running, window_rows = config["inference"]["max_concurrency"], config["trainer"]["micro_batch_tokens"]
        mode, placement = config["train"]["mode"], config["run"]["placement"]
        transport, is_by_index = config["publish"]["transport"], config["train"]["order"] == "prompt"
        has_dock = not is_by_index and not config["prompts"]["reserve"]
        if not all(isinstance(each, int) and 0 < each <= LARGEST for each in (*sizes, max_running, window_rows)):
            raise TypeError
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{str(run_dir)!r} has no config.json of a run: name the run.dir of a run") from error
    if placement == "turns":
        raise ConfigError(
            'run.placement is "turns": a plan divides devices among pools that have devices of their own; name a run '
            'with "separate"'
        )
    schedule: Schedule = "synchronous" if mode == "synchronous" else "periodic"
    set_up = SetUp(max_running=max_running, window_rows=window_rows, schedule=schedule, has_dock=has_dock)
    num_chains = int(transport in CHAINED)
    if transport == "stages":
        num_chains = TrainerSection.model_validate(config["trainer"]).num_senders
    return set_up, math.prod(sizes), num_chains


def checkpoint_every(run_dir: Path) -> int:
    """Iterations between checkpoints, of a run's config.json; of one that saves none, as `calibrate` has, the default.

    Raises:
        ConfigError: it is no run's.
    """
    section = object_in(run_dir / "config.json").get("checkpoint")
    every = section.get("every") if isinstance(section, dict) else None
    return every if isinstance(every, int) and 0 < every <= LARGEST else CheckpointSection().every


def require_same(run_dir: Path, other: Path) -> None:
    """
    Raises:
        ConfigError: they are the same run, or of different models, engines or devices.
    """
    if run_dir.resolve() == other.resolve():
        raise ConfigError(f"{str(other)!r} is named twice: name each run once")
    one, two = object_in(run_dir / "config.json"), object_in(other / "config.json")
    for section, key in SAME:
        values = [config[section].get(key) if isinstance(config.get(section), dict) else None for config in (one, two)]
        if values[0] != values[1]:
            raise ConfigError(
                f"{section}.{key} is {values[0]!r} in {str(run_dir)!r}, and {values[1]!r} in {str(other)!r}: expected "
                "runs of one model on the same hardware, whose costs are the same"
            )


def iterations_of(run_dir: Path, of_config: tuple[SetUp, int, int]) -> list[Iteration]:
    """The last ones with the same number of instances and devices as the very last; the first of a run, and those that
    are far longer than the others, are left out."""
    run = RunRecords(run_dir)
    needed = (*PARTS, "num_instances", "num_training_devices")
    # The wait for an evaluation, which only some have, is no part of what is simulated.
    records = [
        {**each, "seconds": each["seconds"] - (number_of(each.get("evaluation_s")) or 0.0)}
        for each in run.metrics.new_records()
        if has_iteration(each) and _has(each, needed)
    ]
    records = [each for each in records if each["seconds"] > 0]
    same = ("num_instances", "num_training_devices", "num_inference_devices")
    records = [each for each in records[1:] if all(each.get(name) == records[-1].get(name) for name in same)]
    records = records[-NUM_ITERATIONS:]
    longest_s = TOO_LONG * median([each["seconds"] for each in records] or [0.0])
    chosen = {each["iteration"]: each for each in records if each["seconds"] <= longest_s}
    set_up, of_replica, num_chains = of_config
    if records:
        numbers = int(records[-1]["num_instances"]), int(records[-1]["num_training_devices"]) // of_replica
        set_up = replace(set_up, num_instances=max(1, numbers[0]), num_replicas=max(1, numbers[1]))
    rows: dict[int, list[Record]] = {}
    for row in filter(has_iteration, run.groups(min(chosen, default=0) - LOOKED_BACK)):
        rows.setdefault(row["iteration"], []).append(row)
    lengths: dict[str, float] = {}
    for number in sorted(rows):
        rows[number] = _expecting(rows[number], lengths)
    found = [
        iteration
        for number, record in chosen.items()
        if (iteration := _iteration(record, rows.get(number, []), set_up, num_chains)) is not None
    ]
    if len(found) < FEWEST:
        raise ConfigError(
            f"{str(run_dir)!r} has {len(found)} iterations to plan with: expected at least {FEWEST} after the first, "
            "with as many instances as the last one has, and the times of all groups, which were answered once in one "
            "turn and trained by one replica; run some more, with trainer.num_processes of one replica"
        )
    return found


def _expecting(rows: Sequence[Record], lengths: dict[str, float]) -> list[Record]:
    """Rows of an iteration with how long their responses were `expected` to be, as a multiple of the mean: by a
    prompt's own history, else by all `lengths` so far, to which it adds theirs."""
    if not all(isinstance(row.get("prompt_id"), str) and _is_plain(row) for row in rows):
        return list(rows)
    usual = fmean(lengths.values()) if lengths else 1.0
    expected = [max(1.0, lengths.get(row["prompt_id"], usual)) for row in rows]
    for row in rows:
        mean = row["num_response_tokens"] / row["num_responses"]
        lengths[row["prompt_id"]] = (lengths.get(row["prompt_id"], mean) + mean) / 2
    return [{**row, "expected": each / fmean(expected)} for row, each in zip(rows, expected, strict=True)]


def _iteration(record: Record, rows: Sequence[Record], set_up: SetUp, num_chains: int) -> Iteration | None:
    """None if something was interrupted in it, or a trained group or its times are unknown, or there twice."""
    if not all(map(_is_plain, rows)):
        return None
    trained = [row for row in rows if row.get("is_trained", True)]
    if len(trained) != record.get("num_groups", len(trained)):
        return None
    windows: dict[tuple[float, float], int] = {}
    for row in trained:
        if _has(row, WINDOW):
            window = (row["train_started_s"], row["train_finished_s"])
            windows[window] = windows.get(window, 0) + _shape(row).num_rows
    if not windows:
        return None
    dispatched_s = min(row["started_s"] for row in trained)

    def finished_s(row: Record) -> float | None:
        return max(0.0, row["finished_s"] - dispatched_s) if row.get("is_trained", True) else None

    in_order = sorted(rows, key=lambda row: number_of(row.get("started_s")) or 0.0)
    num_bytes = number_of(record.get("publish_bytes")) or 0.0
    return Iteration(
        record,
        tuple(Group(_shape(row), finished_s(row)) for row in in_order),
        tuple(
            Window(rows, start - dispatched_s, max(start, end) - dispatched_s) for (start, end), rows in windows.items()
        ),
        set_up,
        num_bytes / num_chains if num_chains and 0 < num_bytes <= LARGEST else 0.0,
    )


def _is_plain(row: Record) -> bool:
    """Whether it is the row of a group of single answers that nothing has interrupted."""
    names = (*SIZES, *TIMES) if row.get("is_trained", True) else SIZES
    is_whole = row.get("attempts", 1) == 1 and row.get("num_pieces", 1) == 1
    return is_whole and _has(row, names) and MOST >= row["num_turns"] == row["num_responses"] > 0


def _has(record: Record, names: Iterable[str]) -> bool:
    """Whether it has these, and they are sizes or times."""
    values = (number_of(record.get(name)) for name in names)
    return all(value is not None and 0 <= value <= LARGEST for value in values)


def _shape(row: Record) -> Shape:
    """The longest response is known, of the others their mean; of earlier releases all have the mean."""
    number, tokens = int(row["num_responses"]), int(row["num_response_tokens"])
    longest = min(int(number_of(row.get("longest_rollout_tokens")) or 0) or -(-tokens // number), tokens)
    others = number - 1
    mean, more = divmod(tokens - longest, others) if others else (0, 0)
    lengths = (longest, *(mean + (place < more) for place in range(others)))
    return Shape(int(row["num_prompt_tokens"]), lengths, row.get("is_trained", True), row.get("expected", 1.0))
