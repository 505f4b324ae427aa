"""`async-rl trace RUN [-o FILE] [--last N]`: the last periods of a run as a trace for Perfetto or chrome://tracing.

Reads the records of a run that goes on or is over, and writes the JSON trace event format. Bars of one row of a trace
must not overlap unless one contains the other. So the trainer has one row, in which an iteration contains its publish,
periods and steps, and a period its windows and waits; groups that an instance rolled out at the same time are in rows
of their own, as are groups that waited in the queue. Rows of groups without times, those of other replicas, are left
out. Exit codes: 0 success, 2 no records there.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.records.rotation import TIMELINE
from async_rl.records.run_records import METRICS, Record, RunRecords, has_iteration, number_of, require_readable
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text

NUM_PERIODS = 10
GROUP_TIMES = ("started_s", "finished_s", "train_started_s", "train_finished_s")

Event = dict[str, Any]

TRAINER_PID, QUEUE_PID, EVALUATION_PID, FIRST_INSTANCE_PID = 1, 2, 3, 10
"""What the format calls processes are the parts of the run."""

_US = 1e6


def trace_of(run_dir: Path, num_periods: int) -> str:
    """The trace of the last periods that have a record, as JSON.

    Raises:
        ConfigError: the run has no records, or they are not those of a run.
    """
    require_readable(run_dir, [METRICS, TIMELINE.name])
    run = RunRecords(run_dir)
    records = {record["iteration"]: record for record in filter(_is_timed, run.metrics.new_records())}
    if not records:
        raise ConfigError(
            f"{str(run_dir)!r} has no complete iteration in metrics.jsonl: name the run.dir of a run, or wait for its "
            "first iteration"
        )
    last = [records[iteration] for iteration in sorted(records)[-num_periods:]]
    groups = filter(_is_timed_group, run.groups(last[0]["iteration"]))
    try:
        return json.dumps(make_trace(last, groups, filter(_is_timed, run.evaluations.new_records())), allow_nan=False)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the records in {str(run_dir)!r} are not those of a run ({type(error).__name__}: {error}): repair or "
            "remove the lines that something else wrote"
        ) from error


def _is_timed(record: Record) -> bool:
    """Whether a record of `metrics.jsonl` or `evaluations.jsonl` has its times, as numbers."""
    times = (record.get("seconds"), record.get("started_unix_s"))
    spans = record.get("spans", [])
    is_whole = has_iteration(record) and all(number_of(time) is not None for time in times)
    return is_whole and isinstance(spans, list) and all(map(_is_span, spans))


def _is_span(span: Any) -> bool:
    return isinstance(span, list) and len(span) == 3 and all(number_of(time) is not None for time in span[1:])


def _is_timed_group(row: Record) -> bool:
    """Whether a row of `timeline.jsonl` has its times: those of other replicas have none."""
    return all(number_of(row.get(time)) is not None for time in GROUP_TIMES)


@dataclass(slots=True)
class _Rows:
    """The rows of one part; bars come by their start, and each goes to a row whose last bar has ended."""

    pid: int
    ends: list[tuple[float, int]] = field(default_factory=list)
    """A heap of (end of the last bar, row)."""

    def bar(self, name: str, start_s: float, end_s: float, **args: Any) -> Event:
        row = heappop(self.ends)[1] if self.ends and self.ends[0][0] <= start_s else len(self.ends)
        heappush(self.ends, (end_s, row))
        return _bar(name, self.pid, row, start_s, end_s, args)


def make_trace(records: Sequence[Record], groups: Iterable[Record], evaluations: Iterable[Record]) -> dict[str, Any]:
    """The trace of consecutive iterations.

    Args:
        records: of `metrics.jsonl`, ascending, at least one.
        groups: rows of `timeline.jsonl`; those of other iterations are left out.
        evaluations: records of `evaluations.jsonl`, the same.
    """
    first_unix_s = records[0]["started_unix_s"]
    starts = {each["iteration"]: each["started_unix_s"] - first_unix_s for each in records}
    of_iteration: dict[int, list[Record]] = {iteration: [] for iteration in starts}
    for group in groups:
        if group["iteration"] in of_iteration:
            of_iteration[group["iteration"]].append(group)
    events: list[Event] = []
    for record in records:
        events += _of_trainer(record, starts[record["iteration"]], of_iteration[record["iteration"]])
    timed = [(starts[iteration], group) for iteration, rows in of_iteration.items() for group in rows]
    timed.sort(key=lambda each: each[0] + each[1]["started_s"])
    events += _of_instances(timed)
    events += _of_queue(timed)
    events += _of_evaluations([each for each in evaluations if each["iteration"] in starts], first_unix_s)
    events.append(_named("process_name", TRAINER_PID, "trainer"))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _windows_of(groups: Sequence[Record]) -> list[tuple[float, float, list[Record]]]:
    """(start, end, groups) of each window: groups of one window have its times."""
    windows: dict[tuple[float, float], list[Record]] = {}
    for group in groups:
        windows.setdefault((group["train_started_s"], group["train_finished_s"]), []).append(group)
    return [(*times, windows[times]) for times in sorted(windows)]


def _of_trainer(record: Record, at_s: float, groups: Sequence[Record]) -> Iterator[Event]:
    def bar(name: str, start_s: float, end_s: float, **args: Any) -> Event:
        return _bar(name, TRAINER_PID, 0, at_s + start_s, at_s + end_s, args)

    figures = {key: value for key, value in record.items() if number_of(value) is not None}
    yield bar(f"iteration {record['iteration']}", 0.0, record["seconds"], **figures)
    windows = _windows_of(groups)
    for name, start_s, end_s in record.get("spans", ()):
        yield bar(name, start_s, end_s)
        if name == "period":
            yield from _of_period(bar, start_s, end_s, windows)
    if "spans" not in record:
        for start_s, end_s, trained in windows:
            yield bar("window", start_s, end_s, groups=[group["index"] for group in trained])


def _of_period(bar: Any, start_s: float, end_s: float, windows: Sequence[Any]) -> Iterator[Event]:
    """The windows within a period, and the waits between them."""
    waits_from_s = start_s
    for window_start_s, window_end_s, trained in windows:
        if not start_s <= window_start_s < end_s:
            continue
        if window_start_s > waits_from_s:
            yield bar("wait", waits_from_s, window_start_s)
        yield bar("window", window_start_s, window_end_s, groups=[group["index"] for group in trained])
        waits_from_s = window_end_s
    if waits_from_s < end_s:
        yield bar("wait", waits_from_s, end_s)


def _of_instances(timed: Sequence[tuple[float, Record]]) -> Iterator[Event]:
    rows: dict[str, _Rows] = {}
    for at_s, group in timed:
        instance = _instance_of(group)
        if instance not in rows:
            rows[instance] = _Rows(FIRST_INSTANCE_PID + len(rows))
            yield _named("process_name", rows[instance].pid, instance)
        names = ("iteration", "prompt_id", "reward_mean", "num_response_tokens", "num_truncated", "attempts")
        args = {name: value for name in names if _is_shown(value := group.get(name))}
        yield rows[instance].bar(
            f"group {group['index']}", at_s + group["started_s"], at_s + group["finished_s"], **args
        )


def _is_shown(value: Any) -> bool:
    """JSON has no infinite numbers."""
    return not isinstance(value, float) or number_of(value) is not None


def _instance_of(group: Record) -> str:
    """The instance that sampled most of a group's tokens."""
    gaps = group.get("logprob_gaps") or {}
    return max(gaps, key=lambda name: gaps[name]["tokens"], default="unknown instance")


def _of_queue(timed: Sequence[tuple[float, Record]]) -> Iterator[Event]:
    """Finished groups until their window begins, and how many there are."""
    if not timed:
        return
    rows, changes = _Rows(QUEUE_PID), []
    for at_s, group in sorted(timed, key=lambda each: each[0] + each[1]["finished_s"]):
        start_s, end_s = at_s + group["finished_s"], at_s + group["train_started_s"]
        yield rows.bar(f"group {group['index']}", start_s, max(start_s, end_s), iteration=group["iteration"])
        changes += [(start_s, 1), (max(start_s, end_s), -1)]
    yield _named("process_name", QUEUE_PID, "queue")
    waiting = 0
    for when_s, change in sorted(changes):
        waiting += change
        yield {
            "name": "finished groups",
            "ph": "C",
            "pid": QUEUE_PID,
            "tid": 0,
            "ts": when_s * _US,
            "args": {"groups": waiting},
        }


def _of_evaluations(evaluations: Sequence[Record], first_unix_s: float) -> Iterator[Event]:
    rows = _Rows(EVALUATION_PID)
    for each in sorted(evaluations, key=lambda each: float(each["started_unix_s"])):
        start_s = each["started_unix_s"] - first_unix_s
        args = {name: each.get(name) for name in ("iteration", "num_prompts", "total_prompts")}
        yield rows.bar(f"evaluation on {each['set']}", start_s, start_s + each["seconds"], **args)
    if evaluations:
        yield _named("process_name", EVALUATION_PID, "evaluation")


def _bar(name: str, pid: int, row: int, start_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": row,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "args": dict(args),
    }


def _named(what: str, pid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}


def make_parser() -> Parser:
    parser = Parser(
        "async-rl trace",
        "Writes the last periods of a run as a trace, which https://ui.perfetto.dev and chrome://tracing show.",
        "RUN [OPTIONS]",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir of the run")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="by default trace.json in the run's directory"
    )
    parser.add_argument("--last", type=int, default=NUM_PERIODS, metavar="N", help="periods, the newest ones")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.last < 1:
        parser.error(f"--last is {options.last}: expected at least 1 period")
    output = options.output or options.run / "trace.json"
    try:
        write_file(output, trace_of(options.run, options.last))
    except AsyncRLError as error:
        print(f"async-rl trace: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    print(f"{output}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
