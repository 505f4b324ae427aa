"""`async-rl trace RUN [-o FILE] [--last N]`: the last periods of a run as a trace for Perfetto or chrome://tracing.

Reads the records of a run that goes on or is over. Exit codes: 0 success, 2 no records there.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError, ConfigError
from async_rl.files import write_file
from async_rl.programs.command_line import USAGE_ERROR, Parser
from async_rl.programs.error_text import error_text
from async_rl.tracking.record_lines import number_of, record_of, require_readable, whole_lines
from async_rl.tracking.timeline import TIMELINE
from async_rl.tracking.trace import make_trace

NUM_PERIODS = 10
GROUP_TIMES = ("started_s", "finished_s", "train_started_s", "train_finished_s")


def trace_of(run_dir: Path, num_periods: int) -> str:
    """The trace of the last periods that have a record, as JSON.

    Raises:
        ConfigError: the run has no records, or they are not those of a run.
    """
    require_readable(run_dir, ["metrics.jsonl", TIMELINE.name])
    records = {record["iteration"]: record for record in _rows(run_dir / "metrics.jsonl", _is_timed)}
    if not records:
        raise ConfigError(
            f"{str(run_dir)!r} has no complete iteration in metrics.jsonl: name the run.dir of a run, or wait for its "
            "first iteration"
        )
    last = [records[iteration] for iteration in sorted(records)[-num_periods:]]
    first_iteration = last[0]["iteration"]
    evaluations = list(_rows(run_dir / "evaluations.jsonl", _is_timed))
    try:
        trace = make_trace(last, _groups(run_dir, first_iteration), evaluations)
        return json.dumps(trace, allow_nan=False)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the records in {str(run_dir)!r} are not those of a run ({type(error).__name__}: {error}): repair or "
            "remove the lines that something else wrote"
        ) from error


def _groups(run_dir: Path, first_iteration: int) -> Iterator[dict[str, Any]]:
    """Of these iterations and later ones; files that only have earlier ones are not read."""
    for part in reversed(TIMELINE.parts(run_dir)):
        rows = list(_rows(part, _is_timed_group))
        yield from (row for row in rows if row["iteration"] >= first_iteration)
        if rows and rows[0]["iteration"] < first_iteration:
            break


def _rows(path: Path, is_whole: Callable[[dict[str, Any]], bool]) -> Iterator[dict[str, Any]]:
    """Those that can be read: the trainer may be writing the last one, or have left one broken."""
    for line in whole_lines(path):
        record = record_of(line)
        if record is not None and isinstance(record.get("iteration"), int) and is_whole(record):
            yield record


def _is_timed(record: Mapping[str, Any]) -> bool:
    """Whether a record of `metrics.jsonl` or `evaluations.jsonl` has its times, as numbers."""
    times = (record.get("seconds"), record.get("started_unix_s"))
    spans = record.get("spans", [])
    return all(number_of(time) is not None for time in times) and isinstance(spans, list) and all(map(_is_span, spans))


def _is_span(span: Any) -> bool:
    return isinstance(span, list) and len(span) == 3 and all(number_of(time) is not None for time in span[1:])


def _is_timed_group(row: Mapping[str, Any]) -> bool:
    """Whether a row of `timeline.jsonl` has its times: those of other replicas have none."""
    return all(number_of(row.get(time)) is not None for time in GROUP_TIMES)


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
