"""One run of each side on the work of a case, and how fast it was."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.common.case import Case
from benchmarks.peers.processes import Mark, guarded
from benchmarks.peers.work import Engine, prepare

TRL_PROGRAM = Path(__file__).with_name("trl_program.py")
MICRO_BATCHES = (8, 32, 128)
"""Responses in a micro-batch of TRL; the fastest counts."""

WARM_UP = 2
"""Iterations before those that count."""

POLL_S = 0.05
LIMIT_S = 7200.0


class Speed(NamedTuple):
    """Response tokens per second."""

    per_cpu_s: float
    per_s: float


def speed_between(begin: Mark, end: Mark, num_tokens: int) -> Speed:
    return Speed(num_tokens / (end.cpu_s - begin.cpu_s), num_tokens / (end.wall_s - begin.wall_s))


def run_ours(case: Case, kl_coef: float, iterations: int, engine: Engine) -> Speed:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(case, kl_coef, directory, iterations, engine)
        metrics = directory / "run" / "metrics.jsonl"
        begin = end = None
        with guarded([sys.executable, "-m", "deploy.local.run", str(directory / "run.toml")], directory) as side:
            while side.runs() and end is None:
                num_done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
                if begin is None and num_done >= WARM_UP:
                    begin, first = side.mark(), num_done
                if begin is not None and num_done >= iterations:
                    end = side.mark()
                time.sleep(POLL_S)
            # It ends by itself; what it does to end is not counted.
            side.require_success(LIMIT_S)
            if begin is None or end is None:
                raise side.failure("ended before its last iteration was seen")
        return speed_between(begin, end, (iterations - first) * case.num_tokens)


def run_trl(case: Case, kl_coef: float, iterations: int, python: str, micro_batch: int) -> Speed:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        work = {**prepare(case, kl_coef, directory, iterations), "micro_batch": micro_batch}
        with guarded([python, str(TRL_PROGRAM), json.dumps(work)], directory) as side:
            side.require_success(LIMIT_S)
            marks = [Mark(**json.loads(line)) for line in side.output().splitlines() if line.startswith('{"cpu_s"')]
            if len(marks) != iterations:
                raise side.failure(f"reported {len(marks)} steps, expected {iterations}")
    return speed_between(marks[WARM_UP - 1], marks[-1], (iterations - WARM_UP) * case.num_tokens)
