"""The same GRPO work with async-rl and with TRL's GRPOTrainer, in turn.

    python -m benchmarks.peers --json --trl-python PYTHON [--repeats N] [--iterations N] [--kl-coef C]
        [--cases CASE ...]

`PYTHON` has TRL (`make bench-peers` makes an environment for it). Both sides train the same random Qwen3 in float32 on
the same prompts, `GROUPS` of `P` tokens, each with `G` responses of exactly 64 tokens, with AdamW; a `CASE` is written
`SIZE:P:G:GROUPS`, and with a `--kl-coef` there is a reference. Every process has one thread. TRL generates with
transformers' `generate` and trains with the fastest of the micro-batches that `MICRO_BATCHES` lists. async-rl is
`async-rl run` with one instance of the embedded engine.

Counted is the time from the end of the third iteration on. The last line is one JSON object, for each case:

- `ours_per_cpu_s.CASE`, `trl_per_cpu_s.CASE`: median response tokens per processor second of all processes;
- `cpu_ratio.CASE`: median over pairs of ours / TRL's;
- `ours_per_s.CASE`, `trl_per_s.CASE`, `wall_ratio.CASE`: the same per second on the clock. async-rl uses two cores, TRL
  one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from benchmarks.common.case import Case
from benchmarks.peers.work import prepare

TRL_PROGRAM = Path(__file__).with_name("trl_program.py")
MICRO_BATCHES = (8, 32, 128)
"""Responses in a micro-batch of TRL; the fastest counts."""

WARM_UP = 3
"""Iterations before those that count."""

POLL_S = 0.05
LIMIT_S = 1800.0
DEFAULT = ("2M:80:8:16", "2M:512:8:16", "31M:80:8:16", "31M:512:8:8")


class Mark(NamedTuple):
    """Processor seconds of all processes of a side so far, and the clock."""

    cpu_s: float
    wall_s: float


class Speed(NamedTuple):
    """Response tokens per second."""

    per_cpu_s: float
    per_s: float


def speed_between(begin: Mark, end: Mark, num_tokens: int) -> Speed:
    return Speed(num_tokens / (end.cpu_s - begin.cpu_s), num_tokens / (end.wall_s - begin.wall_s))


def run_ours(case: Case, kl_coef: float, iterations: int) -> Speed:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(case, kl_coef, directory, iterations)
        output = directory / "output.txt"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.local.run", str(directory / "run.toml")], stdout=log, stderr=log
            )
        metrics = directory / "run" / "metrics.jsonl"
        begin = end = None
        try:
            while process.poll() is None and end is None:
                num_done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
                if begin is None and num_done >= WARM_UP:
                    begin, first = _mark_of_tree(process.pid), num_done
                if begin is not None and num_done >= iterations:
                    end = _mark_of_tree(process.pid)
                time.sleep(POLL_S)
            # It ends by itself; what it does to end is not counted.
            process.wait(LIMIT_S)
        finally:
            process.kill()
        if begin is None or end is None:
            raise RuntimeError(f"the run ended before its last iteration was seen:\n{output.read_text()[-3000:]}")
        return speed_between(begin, end, (iterations - first) * case.num_tokens)


def _mark_of_tree(pid: int) -> Mark:
    root = psutil.Process(pid)
    spent = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        # Those that have ended are among the children of those that wait for them.
        spent += times.user + times.system + times.children_user + times.children_system
    return Mark(spent, time.monotonic())


def run_trl(case: Case, kl_coef: float, iterations: int, python: str, micro_batch: int) -> Speed:
    with tempfile.TemporaryDirectory() as name:
        work = {**prepare(case, kl_coef, Path(name), iterations), "micro_batch": micro_batch}
        done = subprocess.run(
            [python, str(TRL_PROGRAM), json.dumps(work)], capture_output=True, text=True, timeout=LIMIT_S
        )
    marks = [Mark(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"cpu_s"')]
    if done.returncode or len(marks) != iterations:
        raise RuntimeError(f"TRL ended with {done.returncode} after {len(marks)} steps:\n{done.stderr[-3000:]}")
    return speed_between(marks[WARM_UP - 1], marks[-1], (iterations - WARM_UP) * case.num_tokens)


def fastest_micro_batch(case: Case, kl_coef: float, python: str) -> int:
    fitting = [size for size in MICRO_BATCHES if case.num_responses % size == 0 and size % case.group_size == 0]
    if len(fitting) < 2:
        return fitting[0] if fitting else case.group_size
    return max(fitting, key=lambda size: run_trl(case, kl_coef, WARM_UP + 2, python, size).per_cpu_s)


def measure(case: Case, kl_coef: float, iterations: int, repeats: int, python: str) -> dict[str, float]:
    micro_batch = fastest_micro_batch(case, kl_coef, python)
    pairs = [
        (run_ours(case, kl_coef, iterations), run_trl(case, kl_coef, iterations, python, micro_batch))
        for _ in range(repeats)
    ]
    found = {f"trl_micro_batch.{case}": float(micro_batch)}
    for field, name in (("per_cpu_s", "cpu"), ("per_s", "wall")):
        ours, trl = ([getattr(pair[side], field) for pair in pairs] for side in (0, 1))
        found[f"ours_{field}.{case}"] = statistics.median(ours)
        found[f"trl_{field}.{case}"] = statistics.median(trl)
        found[f"{name}_ratio.{case}"] = statistics.median(our / their for our, their in zip(ours, trl, strict=True))
    return found


def run(cases: Sequence[Case], kl_coef: float, iterations: int, repeats: int, python: str) -> Mapping[str, Any]:
    found: dict[str, float] = {}
    for case in cases:
        found |= measure(case, kl_coef, iterations, repeats, python)
        print(json.dumps(found), file=sys.stderr, flush=True)
    return {key: round(value, 3) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="The same GRPO work with async-rl and with TRL."
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object to standard output")
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL")
    parser.add_argument("--repeats", type=int, default=3, help="pairs that are counted (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=10, help="of each run, from 4 on (default: %(default)s)")
    parser.add_argument("--kl-coef", type=float, default=0.0, help="weight of the KL to a reference; 0 has none")
    parser.add_argument(
        "--cases",
        type=Case.parse,
        nargs="+",
        default=[Case.parse(text) for text in DEFAULT],
        metavar="SIZE:P:G:GROUPS",
        help=f"by default {' '.join(DEFAULT)}",
    )
    options = parser.parse_args()
    if options.iterations <= WARM_UP:
        parser.error(f"--iterations {options.iterations}: the first {WARM_UP} are not counted, give more")
    print(json.dumps(run(options.cases, options.kl_coef, options.iterations, options.repeats, options.trl_python)))


if __name__ == "__main__":
    main()
