"""The dashboard on a long run: how fast it answers and draws, and what memory its server takes.

    python -m benchmarks.dashboard --json

A synthetic run (1,000 iterations of 512 groups from 8 instances by default) is written to a temporary directory, its
server runs in a process of its own, and one client asks. The last line is one JSON object, times in wall seconds:

- `timeline_mb`: size of the run's `timeline.jsonl` and its older parts;
- `records_s`: all records, by a server that has just started;
- `first_period_s`: one iteration's groups, for which the server reads the whole timeline once; `period_s`: the median
  of other iterations afterwards;
- `text_search_s`: a text in all samples;
- `server_peak_mb`: peak of the server's resident memory, and `server_start_mb` before the first request;
- `report_s` and `report_mb`;
- where Chromium is: `page_s`, from the request to a page with all curves, a period and samples; `page_again_s`, the
  same when the server has read the timeline; `redraw_s` of all charts in view with another smoothing;
  `other_period_s`, from the choice of an iteration to its picture.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.browser import CHROMIUM, Tab, browser_tab
from benchmarks.common.synthetic_run import SyntheticRun

NUM_PERIODS = 9

REDRAW = """(async () => {
  const start = performance.now();
  const select = document.getElementById("smoothing");
  select.value = VALUE;
  select.dispatchEvent(new Event("change"));
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 0)));
  return (performance.now() - start) / 1000;
})()"""

OTHER_PERIOD = """(async () => {
  const start = performance.now();
  const input = document.getElementById("period-iteration");
  input.value = ITERATION;
  input.dispatchEvent(new Event("change"));
  const summary = document.getElementById("period-summary");
  const isShown = () => summary.textContent.startsWith("Iteration ITERATION:");
  while (!isShown()) await new Promise((resolve) => setTimeout(resolve, 1));
  return (performance.now() - start) / 1000;
})()"""


@contextmanager
def server(run_dir: Path) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a dashboard on the run."""
    command = [sys.executable, "-m", "async_rl.dashboard", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("dashboard: ").strip(), process.pid
        finally:
            process.terminate()


def seconds_of(function: Callable[[], object]) -> float:
    started_s = time.monotonic()
    function()
    return time.monotonic() - started_s


def memory_mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024 / 1e6


def measure_server(run: SyntheticRun) -> dict[str, float]:
    def ask(path: str) -> Callable[[], object]:
        return lambda: urllib.request.urlopen(f"{url}api/{path}", timeout=600).read()

    with server(run.run_dir) as (url, pid):
        ask("runs")()
        start_mb = memory_mb(pid, "VmRSS")
        records_s = seconds_of(ask("records?run=0"))
        iterations = [run.num_iterations * part // (NUM_PERIODS + 1) for part in range(1, NUM_PERIODS + 1)]
        first_s, *others_s = [seconds_of(ask(f"period?run=0&iteration={number}")) for number in iterations]
        search_s = seconds_of(ask("samples?run=0&text=nowhere"))
        return {
            "records_s": records_s,
            "first_period_s": first_s,
            "period_s": statistics.median(others_s),
            "text_search_s": search_s,
            "server_start_mb": start_mb,
            "server_peak_mb": memory_mb(pid, "VmHWM"),
        }


def measure_report(run: SyntheticRun) -> dict[str, float]:
    output = run.run_dir / "report.html"
    command = [sys.executable, "-m", "async_rl.dashboard.report", str(run.run_dir), "-o", str(output)]
    taken_s = seconds_of(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    return {"report_s": taken_s, "report_mb": output.stat().st_size / 1e6}


async def measure_page(run: SyntheticRun) -> dict[str, float]:
    with server(run.run_dir) as (url, _):
        async with browser_tab() as tab:
            page_s, again_s = [await _open_s(tab, url) for _ in range(2)]
            redraw_s = [await tab.value(REDRAW.replace("VALUE", repr(size))) for size in ("5", "20", "50", "0", "20")]
            numbers = [str(run.num_iterations * part // (NUM_PERIODS + 1)) for part in range(1, NUM_PERIODS + 1)]
            period_s = [await tab.value(OTHER_PERIOD.replace("ITERATION", number)) for number in numbers]
            assert not tab.errors, tab.errors
    return {
        "page_s": page_s,
        "page_again_s": again_s,
        "redraw_s": statistics.median(redraw_s),
        "other_period_s": statistics.median(period_s),
    }


async def _open_s(tab: Tab, url: str) -> float:
    started_s = time.monotonic()
    await tab.open(url)
    return time.monotonic() - started_s


def measure(run: SyntheticRun) -> dict[str, Any]:
    run.write()
    timeline_bytes = sum(path.stat().st_size for path in run.run_dir.glob("timeline*.jsonl"))
    found = {"timeline_mb": timeline_bytes / 1e6, **measure_server(run), **measure_report(run)}
    if CHROMIUM is not None:
        found |= asyncio.run(measure_page(run))
    return {"iterations": run.num_iterations, "groups": run.num_groups} | {
        name: round(value, 3) for name, value in found.items()
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard")
    parser.add_argument("--iterations", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--groups", type=int, default=512, help="of an iteration (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        found = measure(SyntheticRun(Path(name) / "run", options.iterations, options.groups, num_instances=8))
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<18}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
