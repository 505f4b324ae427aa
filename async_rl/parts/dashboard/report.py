"""`async-rl report RUN [RUN2 ...] [-o FILE]`: the dashboard's page on runs as one HTML file, to keep or to send.

The file has at most about 10 MB, however long the runs are: of long ones it has some of the iterations, evenly chosen,
and says so. A browser loads no modules from other files of a disk, so each module of the page becomes a function that
returns what it exports. Exit codes: 0 success, 2 no such run, or the file cannot be written.
"""

import base64
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from async_rl.errors import AsyncRLError
from async_rl.parts.dashboard.page import MODULES, static_file
from async_rl.parts.dashboard.run_data import RunData, as_json, names_of, open_run
from async_rl.shared.files import write_file
from async_rl.shared.programs.command_line import USAGE_ERROR, Parser
from async_rl.shared.programs.error_text import error_text

MAX_RECORDS_BYTES = 3_000_000
MAX_PERIODS_BYTES = 4_000_000
MAX_SAMPLES_BYTES = 2_000_000
"""Of all runs together, as JSON; the page itself has 120 KB."""

MAX_PERIODS = 200
MAX_SAMPLES = 400

Item = TypeVar("Item")

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (const|function|class) (\w+)", re.M)
_LOADED = re.compile(r'^<(?:link|script)\b[^>]*\b(?:href|src)="[^"]*"[^>]*>(?:</script>)?\n', re.M)


def report(runs: Sequence[RunData], opening: str = "") -> str:
    """The page on these runs, below `opening`, which is HTML. Its policy allows its own scripts and styles only."""
    names = names_of(runs)
    data = {"runs": [_run_data(run, name, len(runs)) for run, name in zip(runs, names, strict=True)], "is_live": False}
    style = static_file("uplot/uPlot.min.css") + static_file("style.css")
    library, own = static_file("uplot/uPlot.iife.min.js"), _joined_modules()
    policy = (
        f"default-src 'none'; script-src {_source(library)} {_source(own)}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head, body = _LOADED.sub("", static_file("index.html")).split("</head>\n")
    return (
        head.replace("<title>async-rl</title>", f"<title>{escape(', '.join(names))}</title>").replace(
            '<meta charset="utf-8">\n',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        )
        + f"<style>{style}</style>\n</head>\n"
        + body.replace("<main>\n", f"<main>\n{opening}").replace(
            "</body>",
            f'<script id="embedded" type="application/json">{embedded(as_json(data))}</script>\n'
            f"<script>{library}</script>\n<script>{own}</script>\n</body>",
        )
    )


def _run_data(run: RunData, name: str, num_runs: int) -> dict[str, Any]:
    records = run.records(0, 0, 0)
    periods = (run.period(iteration) for iteration in spread(run.periods(), MAX_PERIODS))
    rows = spread(list(run.all_samples()), MAX_SAMPLES)
    return {
        "name": name,
        "dir": str(run.run_dir),
        "about": run.about(),
        "records": thinned_records(records, MAX_RECORDS_BYTES // num_runs),
        "periods": list(fitting(list(periods), MAX_PERIODS_BYTES // num_runs)),
        "samples": sorted(fitting(rows, MAX_SAMPLES_BYTES // num_runs), key=_newest_first),
    }


def _newest_first(row: Mapping[str, Any]) -> tuple[int, int]:
    """The order in which the live page has samples."""
    index = row.get("index")
    return -row["iteration"], index if isinstance(index, int) else 0


def thinned_records(records: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """The records, or fewer of them; of the proofs all that failed.

    The page draws an evaluation at its iteration: each that is kept has its iteration kept.
    """
    if _size(records) <= max_bytes:
        return records
    metrics, rows = records["metrics"], records["proofs"]["rows"]
    places = range(len(metrics["iterations"]))
    iteration_bytes = _size(metrics) // max(1, len(places))
    evaluations = _thinned_evaluations(records["evaluations"], max_bytes // 4, iteration_bytes)
    evaluated = {record["iteration"] for record in evaluations}
    at_evaluations = {place for place in places if metrics["iterations"][place] in evaluated}
    rest_bytes = max_bytes - _size(evaluations) - iteration_bytes * len(at_evaluations)
    share = min(1.0, max(0, rest_bytes) / _size({**records, "evaluations": []}))
    others = spread(places, int(share * len(places)))
    kept = sorted({*others, *at_evaluations})
    kept_proofs = {id(row) for row in spread(rows, int(share * len(rows)))}
    return {
        **records,
        "evaluations": evaluations,
        "metrics": {
            "first": 0,
            "iterations": [metrics["iterations"][number] for number in kept],
            "hours": [metrics["hours"][number] for number in kept],
            "columns": {name: [column[number] for number in kept] for name, column in metrics["columns"].items()},
        },
        "proofs": {
            "first": 0,
            "total": len(rows),
            "rows": [row for row in rows if id(row) in kept_proofs or row["on_policy"] is not True],
        },
    }


def _thinned_evaluations(
    evaluations: Sequence[Mapping[str, Any]], max_bytes: int, iteration_bytes: int
) -> list[Mapping[str, Any]]:
    """As many of them, at equal distances, as fit with their iterations; of an iteration all sets, or none."""
    of_iterations: dict[int, list[Mapping[str, Any]]] = {}
    for record in evaluations:
        of_iterations.setdefault(record["iteration"], []).append(record)
    kept = fitting(list(of_iterations.values()), max_bytes, iteration_bytes)
    return [record for records in kept for record in records]


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of them, at equal distances, the last one included."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[last - number * last // max(1, most - 1)] for number in reversed(range(most))] if most > 0 else []


def fitting(items: Sequence[Item], max_bytes: int, bytes_beside: int = 0) -> Iterator[Item]:
    """As many of them, at equal distances, as have at most so many bytes in the page, with `bytes_beside` each."""
    sizes = [_size(item) + bytes_beside for item in items]
    most = len(items)
    while most and sum(spread(sizes, most)) > max_bytes:
        most = min(most - 1, int(most * max_bytes / sum(spread(sizes, most))))
    yield from spread(items, most)


def _size(value: Any) -> int:
    """Bytes of a value in the page."""
    return len(embedded(as_json(value)))


def embedded(data: str) -> str:
    """JSON as the page holds it, without "<": an HTML parser ends a script at the first "</", in whatever text."""
    return data.replace("<", "\\u003c")


def _joined_modules() -> str:
    return '"use strict";\nconst modules = {};\n' + "".join(map(_as_function, MODULES))


def _as_function(name: str) -> str:
    """A module that sets `modules.NAME` to what it exports."""
    text = static_file(name)
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    text = _IMPORT.sub(r"const \1 = modules.\2;", text)
    text = _EXPORT.sub(r"\1 \2", text)
    return f"modules.{name.removesuffix('.js')} = (() => {{\n{text}return {{ {exported} }};\n}})();\n"


def _source(content: str) -> str:
    """The source of a policy that allows exactly this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def make_parser() -> Parser:
    parser = Parser("async-rl report", "Writes the dashboard on runs as one HTML file.", "RUN_DIR... [OPTIONS]")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run.dir of a run; several are compared")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), metavar="FILE", help="by default report.html"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    options = make_parser().parse_args(argv)
    try:
        page = report([open_run(run) for run in options.runs])
        write_file(options.output, page)
    except AsyncRLError as error:
        print(f"async-rl report: {error_text(error)}", file=sys.stderr)
        return USAGE_ERROR
    print(f"{options.output}: {len(page.encode()) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
