"""What each part of a run costs, from its records: windows by regression, the instances' part by simulation.

A window's time is a line in its rows (least squares). Steps of an engine are not in the records: their costs are those
with which simulated groups finish nearest to when the real ones did (Gauss-Newton: least squares of times that are
linear in the costs while these change no group's place; from several beginnings, as it may end at costs that are only
nearer than their neighbours). How much the pools slow each other down is tried: training, where a run has windows with
and without rollouts beside them; decoding, with runs that train beside it and after it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from async_rl.records.run_records import Record, number_of
from deploy.scaling.iterations import LARGEST, PARTS, Iteration, iterations_of, require_same, set_up_of
from deploy.scaling.publish import passing_s
from deploy.scaling.simulation import Costs, SetUp, finish_times, simulate

NUM_ROUNDS = 8

STARTS = ((1.0, 1.0, 1.0, 1.0), (2.5, 0.2, 0.2, 1.0), (0.2, 2.5, 0.2, 1.0))
"""Where the search for the instances' costs begins, in multiples of `_thirds`."""

NEAR = 0.999
"""Of the squared error before: the search ends where a round gains less."""

HARDLY_WORSE = 1.1
"""Of a squared error, as a multiple of the least."""

FACTORS = (1.0, 1.1, 1.2, 1.35, 1.5, 1.65, 1.8, 2.0)
"""By which pools may slow each other down: up to half of a processor each."""

FEWEST_WINDOWS = 8
"""With rollouts beside them, and as many without, to tell how much these slow training down."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, its costs, and how well a simulation with these gives the iterations that were not fitted.

    Attributes:
        devices_of: devices of an instance, and of a replica.
        ratios: simulated / measured time of each iteration that was compared.
        chained_bytes: of a publish, that pass from instance to instance; 0 if they do not, or if it is not known.
        others: costs with which the iterations that were fitted come nearly as near: the records do not tell, say, the
            cost of a step from that of its responses, where always as many run.
    """

    set_up: SetUp
    devices_of: tuple[int, int]
    costs: Costs
    iterations: tuple[Iteration, ...]
    ratios: tuple[float, ...]
    others: tuple[Costs, ...] = ()
    chained_bytes: float = 0.0


def measure(run_dir: Path, *others: Path) -> Measured:
    """The costs of a run that goes on or is over.

    Args:
        others: runs of the same model on the same hardware, whose iterations tell more of the costs: of another size,
            schedule or number of responses at once.

    Raises:
        ConfigError: one has too few iterations, or they are not such as a simulation knows.
    """
    set_ups = {path: set_up_of(path) for path in (run_dir, *others)}
    for other in others:
        require_same(run_dir, other)
    runs = [iterations_of(path, set_up) for path, set_up in set_ups.items()]
    costs, *nearly = fit([each for iterations in runs for each in iterations[::2]])
    ratios = [
        simulate(each.shapes, costs, each.set_up).seconds / each.record["seconds"]
        for iterations in runs
        for each in iterations[1::2]
    ]
    last, set_up = runs[0][-1].record, runs[0][-1].set_up
    of_instance = max(1, round(min(number_of(last.get("num_inference_devices")) or 0, LARGEST) / set_up.num_instances))
    of_replica = max(1, int(last["num_training_devices"]) // set_up.num_replicas)
    chained_bytes = median(each.chained_bytes for each in runs[0])
    sizes = (of_instance, of_replica)
    return Measured(set_up, sizes, costs, tuple(runs[0]), tuple(ratios), tuple(nearly), chained_bytes)


def fit(iterations: Sequence[Iteration]) -> list[Costs]:
    """The costs with which simulated iterations come nearest to these; after them others that are hardly worse."""

    def usual(of: Callable[[Record], Any]) -> float:
        return max(0.0, float(median(of(each.record) for each in iterations)))

    def passing(each: Iteration) -> float:
        took_s = each.record["publish_s"]
        return passing_s(each.chained_bytes, took_s, each.set_up.num_instances) if each.chained_bytes else 0.0

    slower, (window_s, row_s) = fit_windows(
        [
            (window.rows, window.end_s - window.start_s, window.shared(each.rollout_s))
            for each in iterations
            for window in each.windows
        ]
    )
    costs = Costs(
        *(0.0, 0.0, 0.0, 0.0, window_s, row_s),
        optimizer_s=usual(lambda record: record["step_s"]),
        publish_s=max(
            0.0,
            median(each.record["publish_s"] - (each.set_up.num_instances - 1) * passing(each) for each in iterations),
        ),
        between_s=usual(lambda record: record["seconds"] - sum(record[name] for name in PARTS[1:])),
        slower_training=slower,
        passing_s=median(map(passing, iterations)),
    )
    tells = {each.set_up.schedule for each in iterations} == {"periodic", "synchronous"}
    found = {
        factor: _fit_instances(iterations, replace(costs, slower_decoding=factor))
        for factor in (FACTORS if tells else FACTORS[:1])
    }
    return found[nearest({factor: error for factor, (error, _) in found.items()})][1]


def nearest(errors: Mapping[float, float]) -> float:
    """The factor with the least error, or 1 if that is hardly worse."""
    return 1.0 if errors[1.0] <= HARDLY_WORSE * min(errors.values()) else min(errors, key=errors.__getitem__)


def fit_windows(windows: Sequence[tuple[int, float, float]]) -> tuple[float, tuple[float, float]]:
    """(times that a window takes as long beside rollouts, the line of `line` without them) of windows of (rows,
    seconds, part of these beside rollouts)."""
    shares = [shared for _, _, shared in windows]
    tells = min(sum(share > 0.9 for share in shares), sum(share < 0.1 for share in shares)) >= FEWEST_WINDOWS
    found = {}
    for factor in FACTORS if tells else FACTORS[:1]:
        # Its seconds for each second that it would take alone.
        stretch = [1 / (1 - share + share / factor) for share in shares]
        points = [(rows, seconds / by) for (rows, seconds, _), by in zip(windows, stretch, strict=True)]
        at_zero, slope = line(points)
        errors = (by * (at_zero + slope * x - y) for (x, y), by in zip(points, stretch, strict=True))
        found[factor] = (math.fsum(error**2 for error in errors), (at_zero, slope))
    factor = nearest({factor: error for factor, (error, _) in found.items()})
    return factor, found[factor][1]


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


def _fit_instances(iterations: Sequence[Iteration], costs: Costs) -> tuple[float, list[Costs]]:
    """The squared error of the nearest costs, and these; after them others that are hardly worse.

    The costs change which instance gets a group, and when; as long as they do not, times are linear in them.
    """
    names = ("step_s", "token_s", "prompt_token_s", "score_s")
    # Of each group that the records have the end of: its place, that of its iteration, and how much slower it was.
    ends: list[tuple[int, float, float]] = []
    place = 0
    for each in iterations:
        for group in each.groups:
            if group.finished_s is not None:
                ends.append((place, *each.alone_s(group.finished_s, costs.slower_decoding)))
            place += 1
    measured = [alone_s * slower for _, alone_s, slower in ends]

    def times(values: Sequence[float]) -> list[float]:
        some = replace(costs, **dict(zip(names, values, strict=True)))
        found = [at_s for each in iterations for at_s in finish_times(each.shapes, some, each.set_up)]
        return [found[place] * slower for place, _, slower in ends]

    def error(values: Sequence[float]) -> float:
        return sum((found - at_s) ** 2 for found, at_s in zip(times(values), measured, strict=True))

    thirds = _thirds(iterations)

    def nearest_to(at: Sequence[float]) -> list[list[float]]:
        now, slopes = times(at), []
        for place, value in enumerate(at):
            change = 1e-6 * (value or thirds[place])
            moved = times([*at[:place], value + change, *at[place + 1 :]])
            slopes.append([(there - here) / change for there, here in zip(moved, now, strict=True)])
        return least_squares(slopes, measured)

    def nearest_from(at: Sequence[float]) -> tuple[float, Sequence[float]]:
        least, best = error(at), at
        for _ in range(NUM_ROUNDS):
            at = nearest_to(at)[0]
            if (found := error(at)) < least:
                is_near = found > NEAR * least
                best, least = at, found
                if is_near:
                    break
            else:
                # It is the nearest only while groups keep their places: half of the way.
                at = [(one + other) / 2 for one, other in zip(at, best, strict=True)]
        return least, best

    starts = [[third * number for third, number in zip(thirds, start, strict=True)] for start in STARTS]
    least, best = min(map(nearest_from, starts))
    others = [other for other in nearest_to(best) if error(other) <= HARDLY_WORSE * least and other != best]
    return least, [replace(costs, **dict(zip(names, each, strict=True))) for each in (best, *others)]


def _thirds(iterations: Sequence[Iteration]) -> list[float]:
    """The costs with which steps, tokens and prompts take a third of the rollouts' time each; scoring hardly any."""
    third_s = max(1e-9, fmean(max(group.finished_s or 0.0 for group in each.groups) for each in iterations) / 3)
    num_steps, num_tokens, num_prompt = (
        max(1.0, fmean(count))
        for count in (
            [max(max(shape.response_tokens) for shape in each.shapes) for each in iterations],
            [
                sum(sum(shape.response_tokens) for shape in each.shapes) / each.set_up.num_instances
                for each in iterations
            ],
            [sum(shape.prompt_tokens for shape in each.shapes) / each.set_up.num_instances for each in iterations],
        )
    )
    return [third_s / num_steps, third_s / num_tokens, third_s / num_prompt, third_s / 100]


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
