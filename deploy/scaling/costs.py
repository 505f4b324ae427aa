"""What each part of a run costs, from its records: windows by regression, the instances' part by simulation.

`timeline.jsonl` says when each group was dispatched, finished and trained, and how long its responses are. A window's
time is a line in its rows (least squares). Steps of an engine are not in the records: their costs are those with which
simulated groups finish nearest to when the real ones did (Gauss-Newton: least squares of times that are linear in the
costs while these change no group's place).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

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
from deploy.scaling.simulation import Costs, SetUp, Shape, finish_times, simulate

NUM_ROUNDS = 8

HARDLY_WORSE = 1.1
"""Of a squared error, as a multiple of the least."""

NUM_ITERATIONS = 20
"""The last ones, of which every other one is fitted, and the others are compared."""

FEWEST = 4

REPLICA = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""Whose product is a replica's ranks."""

PARTS = ("seconds", "publish_s", "step_s", "wait_s", "train_s")
SIZES = ("num_prompt_tokens", "num_response_tokens", "num_responses", "num_turns")
LARGEST, MOST = 2**40, 2**16
"""Tokens and seconds, and responses of a group: beyond it a number is none of a run."""

TIMES = ("started_s", "finished_s")
WINDOW = ("train_started_s", "train_finished_s")
"""Of groups of other replicas than the one that writes the records there are none."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of an iteration: its sizes, and when it finished, in seconds after the dispatch of the batch; None of one
    that a selection left out."""

    shape: Shape
    finished_s: float | None


@dataclass(frozen=True, slots=True)
class Iteration:
    """What the records have of one; groups are in the order of their dispatch."""

    record: Record
    groups: tuple[Group, ...]
    windows: tuple[tuple[int, float], ...]
    """(rows, seconds) of each window of the replica that writes the records."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(group.shape for group in self.groups)


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, its costs, and how well a simulation with these gives the iterations that were not fitted.

    Attributes:
        devices_of: devices of an instance, and of a replica.
        ratios: simulated / measured time of each iteration that was compared.
        others: costs with which the iterations that were fitted come nearly as near: the records do not tell, say, the
            cost of a step from that of its responses, where always as many run.
    """

    set_up: SetUp
    devices_of: tuple[int, int]
    costs: Costs
    iterations: tuple[Iteration, ...]
    ratios: tuple[float, ...]
    others: tuple[Costs, ...] = ()


def measure(run_dir: Path) -> Measured:
    """The costs of a run that goes on or is over.

    Raises:
        ConfigError: it has too few iterations, or they are not such as a simulation knows.
    """
    require_readable(run_dir, ["config.json", METRICS, TIMELINE.name])
    config = object_in(run_dir / "config.json")
    try:
        sizes = [config["trainer"][name] for name in REPLICA]
        max_running, window_rows = config["inference"]["max_concurrency"], config["trainer"]["micro_batch_tokens"]
        mode, placement = config["train"]["mode"], config["run"]["placement"]
        if not all(isinstance(each, int) and 0 < each <= LARGEST for each in (*sizes, max_running, window_rows)):
            raise TypeError
    except (LookupError, TypeError) as error:
        raise ConfigError(f"{str(run_dir)!r} has no config.json of a run: name the run.dir of a run") from error
    if placement == "turns":
        raise ConfigError(
            'run.placement is "turns": a plan divides devices among pools that have devices of their own; name a run '
            'with "separate"'
        )
    iterations = _iterations(run_dir)
    last = iterations[-1].record
    of_replica, num_instances = math.prod(sizes), max(1, int(last["num_instances"]))
    set_up = SetUp(
        num_instances=num_instances,
        num_replicas=max(1, int(last["num_training_devices"]) // of_replica),
        max_running=max_running,
        window_rows=window_rows,
        schedule="synchronous" if mode == "synchronous" else "periodic",
    )
    costs, *others = _fit(iterations[::2], set_up)
    ratios = [simulate(each.shapes, costs, set_up).seconds / each.record["seconds"] for each in iterations[1::2]]
    of_instance = max(1, round(min(number_of(last.get("num_inference_devices")) or 0, LARGEST) / num_instances))
    return Measured(set_up, (of_instance, of_replica), costs, tuple(iterations), tuple(ratios), tuple(others))


def _iterations(run_dir: Path) -> list[Iteration]:
    """The last ones with the same number of instances and devices as the very last; the first of a run is left out."""
    run = RunRecords(run_dir)
    needed = (*PARTS, "num_instances", "num_training_devices")
    records = [
        each for each in run.metrics.new_records() if has_iteration(each) and _has(each, needed) and each["seconds"] > 0
    ]
    same = ("num_instances", "num_training_devices", "num_inference_devices")
    records = [each for each in records[1:] if all(each.get(name) == records[-1].get(name) for name in same)]
    chosen = {each["iteration"]: each for each in records[-NUM_ITERATIONS:]}
    rows: dict[int, list[Record]] = {}
    for row in run.groups(min(chosen, default=0)):
        rows.setdefault(row.get("iteration", -1), []).append(row)
    found = [
        iteration
        for number, record in chosen.items()
        if (iteration := _iteration(record, rows.get(number, []))) is not None
    ]
    if len(found) < FEWEST:
        raise ConfigError(
            f"{str(run_dir)!r} has {len(found)} iterations to plan with: expected at least {FEWEST} after the first, "
            "each with the times of all its groups, which were answered once and trained by one replica; run some "
            "more, with trainer.num_processes of one replica"
        )
    return found


def _iteration(record: Record, rows: Sequence[Record]) -> Iteration | None:
    """None if something was interrupted in it, or the times of a trained group are unknown."""
    if not all(map(_is_plain, rows)):
        return None
    trained = [row for row in rows if row.get("is_trained", True)]
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
    return Iteration(
        record,
        tuple(Group(_shape(row), finished_s(row)) for row in in_order),
        tuple((rows, max(0.0, end - start)) for (start, end), rows in windows.items()),
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
    return Shape(int(row["num_prompt_tokens"]), lengths, row.get("is_trained", True))


def _fit(iterations: Sequence[Iteration], set_up: SetUp) -> list[Costs]:
    def usual(of: Callable[[Record], Any]) -> float:
        return max(0.0, float(median(of(each.record) for each in iterations)))

    window_s, row_s = line([window for each in iterations for window in each.windows])
    return _fit_instances(
        iterations,
        set_up,
        Costs(
            *(0.0, 0.0, 0.0, 0.0, window_s, row_s),
            optimizer_s=usual(lambda record: record["step_s"]),
            publish_s=usual(lambda record: record["publish_s"]),
            between_s=usual(lambda record: record["seconds"] - sum(record[name] for name in PARTS[1:])),
        ),
    )


def line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(at zero, slope), neither below 0, of the line of least squares through (x, y)."""
    points = list(points)
    mean_x, mean_y = (fmean(values) for values in zip(*points, strict=True))
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / variance if variance else 0.0
    at_zero = mean_y - slope * mean_x
    if not mean_x:
        return mean_y, 0.0
    if slope < 0 or not variance:
        return 0.0, mean_y / mean_x
    if at_zero < 0:
        return 0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points)
    return at_zero, slope


def _fit_instances(iterations: Sequence[Iteration], set_up: SetUp, costs: Costs) -> list[Costs]:
    """The costs change which instance gets a group, and when; as long as they do not, times are linear in them.

    After the nearest come others that are hardly worse.
    """
    names = ("step_s", "token_s", "prompt_token_s", "score_s")
    groups = [group for each in iterations for group in each.groups]
    known = [place for place, group in enumerate(groups) if group.finished_s is not None]
    measured = [groups[place].finished_s or 0.0 for place in known]

    def times(values: Sequence[float]) -> list[float]:
        some = replace(costs, **dict(zip(names, values, strict=True)))
        found = [at_s for each in iterations for at_s in finish_times(each.shapes, some, set_up)]
        return [found[place] for place in known]

    def error(values: Sequence[float]) -> float:
        return sum((found - at_s) ** 2 for found, at_s in zip(times(values), measured, strict=True))

    # To begin with, steps, tokens and prompts take a third of the rollouts' time each.
    third_s = max(1e-9, fmean(max(group.finished_s or 0.0 for group in each.groups) for each in iterations) / 3)
    num_tokens, num_prompt, num_steps = (
        max(1.0, sum(count) / len(iterations))
        for count in (
            [sum(group.shape.response_tokens) / set_up.num_instances for group in groups],
            [group.shape.prompt_tokens / set_up.num_instances for group in groups],
            [max(max(shape.response_tokens) for shape in each.shapes) for each in iterations],
        )
    )
    at = [third_s / num_steps, third_s / num_tokens, third_s / num_prompt, third_s / 100]
    best, least = at, error(at)

    def nearest(at: Sequence[float]) -> list[list[float]]:
        now, slopes = times(at), []
        for place, value in enumerate(at):
            change = 1e-6 * value or 1e-9 * third_s
            moved = times([*at[:place], value + change, *at[place + 1 :]])
            slopes.append([(there - here) / change for there, here in zip(moved, now, strict=True)])
        return least_squares(slopes, measured)

    for _ in range(NUM_ROUNDS):
        at = nearest(at)[0]
        if (found := error(at)) < least:
            best, least = at, found
        else:
            # It is the nearest only while groups keep their places: half of the way.
            at = [(one + other) / 2 for one, other in zip(at, best, strict=True)]
    others = [other for other in nearest(best) if error(other) <= HARDLY_WORSE * least and other != best]
    return [replace(costs, **dict(zip(names, each, strict=True))) for each in (best, *others)]


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[list[float]]:
    """Factors of the columns, none below 0, whose sum is nearest to the values; then those of fewer or other columns.

    Each subset of the columns is tried: there are few.
    """
    sizes = [math.sqrt(math.fsum(each * each for each in column)) or 1.0 for column in columns]
    scaled = [[each / size for each in column] for column, size in zip(columns, sizes, strict=True)]
    products = [[_dot(one, other) for other in scaled] for one in scaled]
    wanted = [_dot(column, values) for column in scaled]
    found = [(0.0, [0.0] * len(columns))]
    for subset in (some for number in range(1, len(columns) + 1) for some in combinations(range(len(columns)), number)):
        # A little of the diagonal, where two columns are nearly the same.
        matrix = [[products[i][j] + (1e-9 if i == j else 0.0) for j in subset] for i in subset]
        factors = solve(matrix, [wanted[i] for i in subset])
        if min(factors) >= 0:
            of_all = [0.0] * len(columns)
            for place, factor in zip(subset, factors, strict=True):
                of_all[place] = factor / sizes[place]
            # Of the squared error, what depends on the factors.
            found.append((-_dot(factors, [wanted[i] for i in subset]), of_all))
    return [factors for _, factors in sorted(found)]


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def solve(matrix: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The solution of a positive definite system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, values, strict=True)]
    for place, pivot in enumerate(rows):
        for below in rows[place + 1 :]:
            factor = below[place] / pivot[place]
            for column in range(place, len(pivot)):
                below[column] -= factor * pivot[column]
    found = [0.0] * len(rows)
    for place in reversed(range(len(rows))):
        known = _dot(rows[place][place + 1 : -1], found[place + 1 :])
        found[place] = (rows[place][-1] - known) / rows[place][place]
    return found
